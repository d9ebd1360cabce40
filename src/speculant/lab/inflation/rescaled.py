"""Writes a model with scaled columns, which computes the same function with weights that lie on no grid of integers.

The weights of a model that was quantised lie on a grid, so rounding them to as many bits again shows nothing. Here

    gains of a norm         move to the columns of the matrices that read it, and become 1; the head is untied
    values and outputs      rows of v_proj are multiplied by factors, and columns of o_proj divided by them
    up and down projection  likewise

The factors are lognormal. Nothing scales the embedding table, which stays on its grid.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.lab.checkpoints import save_tensors
from speculant.models import (
    BEFORE_ATTENTION,
    BEFORE_MLP,
    HEAD,
    LAYER,
    NORM,
    TABLE,
    CheckpointFiles,
    DecoderConfig,
    read_plain,
)

SIGMA, SEED = 0.3, 0
_READERS = {
    BEFORE_ATTENTION: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    BEFORE_MLP: ("mlp.gate_proj", "mlp.up_proj"),
}
_FAMILY = "llama"


def write_rescaled(source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of a folder to an existing other folder. Memory holds all weights in float64.

    Raises ModelError for a model that is no Llama without biases.
    """
    files = CheckpointFiles.open(source)
    tensors = {name: read_plain(files.weights, name).to(torch.float64, copy=True) for name in files.weights.names()}
    if files.config["model_type"] != _FAMILY or any(name.endswith("bias") for name in tensors):
        raise ModelError(f"{source} is no Llama model without biases", "use a model of that kind.")
    made = {name: tensor.to(dtype) for name, tensor in _rescaled(tensors, files.decoder).items()}
    save_tensors(made, files.decoder.tensors, folder / "model.safetensors")
    for file in source.glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    config = {**files.config, "tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")  # the last: without it nothing loads


def _rescaled(tensors: Mapping[str, Tensor], decoder: DecoderConfig) -> dict[str, Tensor]:
    made, generator = dict(tensors), torch.Generator().manual_seed(SEED)
    made[HEAD] = made.get(HEAD, made[TABLE]) * made[NORM]
    made[NORM] = torch.ones_like(made[NORM])
    for index, layer in enumerate(decoder.layers):
        at, of = LAYER.format(index), layer.attention
        for norm, readers in _READERS.items():
            gains = made[f"{at}{norm}.weight"]
            for reader in readers:
                made[f"{at}{reader}.weight"] *= gains
            made[f"{at}{norm}.weight"] = torch.ones_like(gains)
        values, inside = _factors(of.kv_heads * of.head_dim, generator), _factors(layer.mlp.size, generator)
        made[f"{at}self_attn.v_proj.weight"] *= values[:, None]
        made[f"{at}self_attn.o_proj.weight"] /= _of_query_heads(values, decoder)
        made[f"{at}mlp.up_proj.weight"] *= inside[:, None]
        made[f"{at}mlp.down_proj.weight"] /= inside
    return made


def _factors(count: int, generator: torch.Generator) -> Tensor:
    return (SIGMA * torch.randn(count, generator=generator, dtype=torch.float64)).exp()


def _of_query_heads(values: Tensor, decoder: DecoderConfig) -> Tensor:
    """Return the factors of all query heads' numbers; query heads that share a key head share its values."""
    of = decoder.attention
    return values.view(of.kv_heads, of.head_dim).repeat_interleave(of.groups, 0).flatten()
