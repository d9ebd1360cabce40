"""Checkpoints of a real size whose text is known: every token has one successor, whatever came before.

The layers' last matrices are of tiny numbers, so that a token's embedding reaches the head nearly unchanged and the
head finds the successor; all of them are read and computed like any others. A draft made for another share of the
successors agrees with its target there and nowhere else, so acceptance is what one asks for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.models.source import resolve_source

VOCABULARY = 32000
TINY = 1e-9
TARGET = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
DRAFT = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def write_pair(folder: Path, agreement: float) -> tuple[Path, Path]:
    """Write a target of 1.04 billion parameters read a pass and a draft of a twentieth; return their folders."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randperm(VOCABULARY, generator=generator)
    wrong = (torch.rand(VOCABULARY, generator=generator) >= agreement).nonzero().flatten()
    guessed = following.clone()
    guessed[wrong] = following[wrong.roll(1)]
    target = write_checkpoint(folder / "target", TARGET, following)
    return target, write_checkpoint(folder / "draft", DRAFT, guessed)


def write_checkpoint(folder: Path, shape: dict[str, int], following: Tensor) -> Path:
    """Write a model after whose token t comes following[t], a permutation."""
    folder.mkdir(parents=True)
    source = resolve_source("demo", "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**COMMON, **shape}))
    save_file(tensors(shape, following), folder / "model.safetensors")
    return folder


def tensors(shape: dict[str, int], following: Tensor) -> dict[str, Tensor]:
    """Make the weights."""
    generator = torch.Generator().manual_seed(1)

    def random(rows: int, columns: int, scale: float = 0.02) -> Tensor:
        return (scale * torch.randn(rows, columns, generator=generator)).bfloat16()

    hidden, inside = shape["hidden_size"], shape["intermediate_size"]
    width, narrow = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    table = random(VOCABULARY, hidden, 1.0)
    head = torch.empty_like(table)
    head[following] = 0.05 * table
    made: dict[str, Any] = {"model.embed_tokens.weight": table, "lm_head.weight": head}
    made["model.norm.weight"] = torch.ones(hidden).bfloat16()
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{at}{name}.weight"] = torch.ones(hidden).bfloat16()
        for name, rows in (("q", width), ("k", narrow), ("v", narrow)):
            made[f"{at}self_attn.{name}_proj.weight"] = random(rows, hidden)
        made[f"{at}self_attn.o_proj.weight"] = random(hidden, width, TINY)
        made[f"{at}mlp.gate_proj.weight"] = random(inside, hidden)
        made[f"{at}mlp.up_proj.weight"] = random(inside, hidden)
        made[f"{at}mlp.down_proj.weight"] = random(hidden, inside, TINY)
    return made
