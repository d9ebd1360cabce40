"""Gives a head of a small target the cost of a large target's: the same function, for the inflated target.

The head's input and output states are copies of the small ones side by side, like the target's residual stream
(lab/inflation/matrices.py). Decoder layers of a head get the target's shape, as in training; the inner width of
feed-forward blocks grows with the hidden size. The number of layers and the output head's tokens stay.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from speculant.drafting.heads.folder import KIND, HeadFolder
from speculant.drafting.heads.parts import HeadParts, Part
from speculant.drafting.heads.short import FILE as SHORT_HEAD
from speculant.engine.drafters import head_parts
from speculant.errors import ConfigError, ModelError
from speculant.files import read_json
from speculant.lab.checkpoints import write_json, write_tensors
from speculant.lab.inflation.matrices import Enlargement, NoisyFiles
from speculant.lab.inflation.model import filled_card, make_folder
from speculant.lab.inflation.shapes import Shape, decoder_shape
from speculant.models.entries import count, show
from speculant.models.families.llama import read_config

_LAYER_CONFIG = "transformer_layer_config"  # of the `speculators` package
_INNER = "inner_size"
_CARD = """\
---
library_name: speculant
pipeline_tag: text-generation
---

# {name} at a larger shape

This is the function of the head `{name}` for its target at the shape of a larger model, written for measuring speed:
drafts are those of the small head, the cost is that of a large one. It was not trained at this size. Licence and origin
are those of `{name}`.

| | {name} | here |
|---|---|---|
{sizes}

The states are the small head's {copies} times over. Further attention heads and rows of the MLP are random, and their
results meet zeros. {function}
"""


def head_kind(folder: Path) -> str | None:
    """Return the method of the head in a folder; None = it is not a head."""
    kind = read_json(folder / "config.json").get(KIND)
    return None if kind is None else str(kind)


def head_shape(folder: Path) -> tuple[Shape, int]:
    """Return the sizes of a head and the dimension of its attention heads; a size that it lacks is 1."""
    inner = _layer_config(read_json(folder / "config.json"))
    if "intermediate_size" in inner:
        decoder = read_config({"max_position_embeddings": 1, "vocab_size": 1, **inner})
        return decoder_shape(decoder), decoder.attention.head_dim
    return Shape(count(inner, "hidden_size"), count(inner, _INNER, 1), 1, 1, 1), 1


def inflate_head(source: Path, folder: Path, shape: Shape, noise: float = 0.0) -> None:
    """Write the head of `source` to `folder`, a new or empty one, for its target at a larger shape, the target's.

    noise: see `inflate`. Raises ModelError for a head that can't be inflated, ConfigError for an unknown kind, for a
    shape that does not hold the head and for a folder that holds files.
    """
    head, parts = _open(source)
    names = {stored: name for stored in sorted(head.names()) if (name := parts.rename(stored)) is not None}
    found = {stored: _part(parts, name, head) for stored, name in names.items()}
    enlargement, weights = _enlargement(head, parts, names, shape), NoisyFiles(head.files, noise)
    tensors = {
        stored: enlargement.grown(part, weights.read(head.stored[stored]), names[stored]).contiguous()
        for stored, part in found.items()
    }
    make_folder(folder)
    write_tensors(folder / "model.safetensors", tensors)
    if (source / SHORT_HEAD).exists():
        shutil.copyfile(source / SHORT_HEAD, folder / SHORT_HEAD)
    (folder / "README.md").write_text(_card(head, enlargement, tensors, noise), encoding="utf-8")
    write_json(folder / "config.json", _grown_config(head.config, enlargement))


def _open(source: Path) -> tuple[HeadFolder, HeadParts]:
    kind = head_kind(source)
    if kind is None:
        raise ModelError(f"{source / 'config.json'} has no {KIND}, so it is not a head", "name the folder of a head.")
    parts = head_parts(kind)
    if parts is None:
        raise ModelError(
            f"{source} is a head of the kind {kind!r}, whose drafter does not describe its parts",
            "add HEAD to the drafter's module, as in the other modules.",
        )
    head = HeadFolder.open(str(source), kind)
    if parts.check is not None:
        parts.check(head)
    return head, parts


def _part(parts: HeadParts, name: str, head: HeadFolder) -> Part:
    part = parts.part(name)
    if part is None:
        raise ModelError(
            f"{head.folder} has a tensor {show(name)}, whose use is not known",
            "inflate a head without it.",
        )
    return part


def _enlargement(head: HeadFolder, parts: HeadParts, names: Mapping[str, str], shape: Shape) -> Enlargement:
    """Return the enlargement of a head, whose states may have another width than the target's."""
    small, head_dim = head_shape(head.folder)
    pattern, entry = next(iter(parts.parts.items()))
    of_target = {
        head.shape(stored)[-1] // entry.streams for stored, name in names.items() if re.fullmatch(pattern, name)
    }
    target_size = min(of_target, default=small.hidden_size)
    if shape.hidden_size % target_size:
        raise ConfigError(
            f"hidden_size {shape.hidden_size} is not a multiple of {target_size}, that of the target of {head.folder}",
            "choose a multiple.",
        )
    copies = shape.hidden_size // target_size
    large = Shape(copies * small.hidden_size, copies * small.intermediate_size, 1, 1, 1)
    if "intermediate_size" in _layer_config(head.config):
        large = replace(shape, hidden_size=large.hidden_size, num_hidden_layers=small.num_hidden_layers)
    return Enlargement(small, large, head_dim, head.files.common_dtype())


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get(_LAYER_CONFIG, config)
    if not isinstance(inner, dict):
        raise ModelError(f"config.json has a {_LAYER_CONFIG} that is not an object", "correct config.json.")
    return inner


def _grown_config(config: dict[str, Any], enlargement: Enlargement) -> dict[str, Any]:
    """Return config.json with the large sizes."""
    inner = _layer_config(config)
    sizes = {**asdict(enlargement.large), "head_dim": enlargement.head_dim, _INNER: enlargement.large.intermediate_size}
    implied = ("num_key_value_heads", "head_dim") if "intermediate_size" in inner else ()
    large = {**inner, **{key: size for key, size in sizes.items() if key in inner or key in implied}}
    return {**config, _LAYER_CONFIG: large} if _LAYER_CONFIG in config else large


def _card(head: HeadFolder, enlargement: Enlargement, tensors: Mapping[str, Tensor], noise: float) -> str:
    before, after = _layer_config(head.config), _layer_config(_grown_config(head.config, enlargement))
    rows = [(key, before[key], after[key]) for key in before if after[key] != before[key]]
    weights = sum(math.prod(head.shape(name)) for name in tensors), sum(each.numel() for each in tensors.values())
    return filled_card(_CARD, head.folder, enlargement, [*rows, ("weights", *weights)], noise)
