"""Checkpoints of a real size whose text is known: each token has one successor.

The last matrices of a layer hold tiny numbers, so a token's embedding reaches the head nearly unchanged, and the head
finds the successor. All matrices are read and multiplied as usual. A draft model that is made for a share of the
successors agrees with its target for these tokens and for no others, so that share is the acceptance rate.
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
_TINY = 1e-9
_TARGET = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
_DRAFT = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
_COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def write_pair(folder: Path, agreement: float) -> tuple[Path, Path]:
    """Write a target of 1.04 billion parameters and a draft model of a twentieth; return their folders.

    agreement: the share of the tokens for which the draft model has the target's successor.
    """
    generator = torch.Generator().manual_seed(0)
    following = torch.randperm(VOCABULARY, generator=generator)
    wrong = (torch.rand(VOCABULARY, generator=generator) >= agreement).nonzero().flatten()
    guessed = following.clone()
    guessed[wrong] = following[wrong.roll(1)]
    target = _write_checkpoint(folder / "target", _TARGET, following)
    return target, _write_checkpoint(folder / "draft", _DRAFT, guessed)


def _write_checkpoint(folder: Path, shape: dict[str, int], following: Tensor) -> Path:
    """Write a model in which following[t], a permutation, comes after token t."""
    folder.mkdir(parents=True)
    source = resolve_source("demo", "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **shape}))
    save_file(_tensors(shape, following), folder / "model.safetensors")
    return folder


def _tensors(shape: dict[str, int], following: Tensor) -> dict[str, Tensor]:
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
        made[f"{at}self_attn.o_proj.weight"] = random(hidden, width, _TINY)
        made[f"{at}mlp.gate_proj.weight"] = random(inside, hidden)
        made[f"{at}mlp.up_proj.weight"] = random(inside, hidden)
        made[f"{at}mlp.down_proj.weight"] = random(hidden, inside, _TINY)
    return made
