"""Checkpoints of a real size whose text is known: each token has one successor.

The last matrices of a layer hold tiny numbers, so a token's embedding reaches the head nearly unchanged, and the head
finds the successor. All matrices are read and multiplied as usual. A draft model that is made for a share of the
successors agrees with its target for these tokens and for no others, so that share is the acceptance rate.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant.lab.checkpoints import save_tensors, written_description
from speculant.models import HEAD, TABLE, DecoderConfig, resolve_source, tensor_shapes

VOCABULARY = 32000
_TINY = 1e-9
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "head_dim": 64,
}  # fmt: skip
LLAMA_1B = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8,
}  # fmt: skip
LLAMA_50M = {
    **_LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
_WRITERS = re.compile(r".*\.(o_proj|down_proj)\.weight")  # the last matrices of a layer's parts

Config = Mapping[str, Any]


def write_pair(
    folder: Path, agreement: float, shapes: tuple[Config, Config] = (LLAMA_1B, LLAMA_50M), first: int = 0
) -> tuple[Path, Path]:
    """Write a target, and a draft model for it, from their config.json files; return their folders.

    agreement: the share of the tokens for which the draft model has the target's successor, on average. It is exact,
    up to rounding, for the `first` tokens of the text that begins with token 0. By default, the target has 1.04 billion
    parameters and the draft model a twentieth.
    """
    size, generator = shapes[0]["vocab_size"], torch.Generator().manual_seed(0)
    following = torch.randperm(size, generator=generator)
    is_wrong = torch.rand(size, generator=generator) >= agreement
    text = [0]
    while len(text) < first:
        text.append(int(following[text[-1]]))
    order = torch.randperm(first, generator=generator)
    is_wrong[text[:first]] = order >= round(agreement * first)
    wrong, guessed = is_wrong.nonzero().flatten(), following.clone()
    guessed[wrong] = following[wrong.roll(1)]
    return (
        _write_checkpoint(folder / "target", shapes[0], following),
        _write_checkpoint(folder / "draft", shapes[1], guessed),
    )


def _write_checkpoint(folder: Path, config: Config, following: Tensor) -> Path:
    """Write a model in which following[t], a permutation, comes after token t."""
    folder.mkdir(parents=True)
    source = resolve_source("demo", "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    described = written_description(config)
    save_tensors(_tensors(described, following), described.tensors, folder / "model.safetensors")
    return folder


def _tensors(described: DecoderConfig, following: Tensor) -> dict[str, Tensor]:
    """Make the weights."""
    generator = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...], scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).bfloat16()

    made = {
        name: torch.ones(shape).bfloat16() if "norm" in name else random(shape, _TINY if _WRITERS.match(name) else 0.02)
        for name, shape in tensor_shapes(described).items()
        if name not in (TABLE, HEAD)
    }
    made[TABLE] = random((described.vocab_size, described.hidden_size), 1.0)
    made[HEAD] = torch.empty_like(made[TABLE])
    made[HEAD][following] = 0.05 * made[TABLE]
    return made
