"""Writes the tensors of a model of any family under the names and in the shapes that its files have.

This is the inverse of reading them (models/weights/source.py): fused tensors are joined again, and others transposed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.models.description import DecoderConfig
from speculant.models.tensor_map import (
    Columns,
    Expression,
    Plus,
    Rows,
    Shape,
    Stacked,
    TensorMap,
    Transposed,
    Unpaired,
    stored_name,
)
from speculant.models.tensor_map import stored_shape as shape_of_stored
from speculant.models.weights.load import read_description


def written_description(config: Mapping[str, Any]) -> DecoderConfig:
    """Return the description in the config.json of a model that will be written. Raises ModelError.

    In a family whose files decide whether the head is tied, it is not if config.json says so.
    """
    described = read_description(config)
    separate = described.head.by_files and not config.get("tie_word_embeddings", True)
    return described.with_head(()) if separate else described


def stored_tensors(tensors: Mapping[str, Tensor], names: TensorMap) -> dict[str, Tensor]:
    """Return a checkpoint's tensors from a model's.

    All model tensors that one stored tensor holds must be given together. Elements that none of them reads are 0.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        expression = names.expression(name)
        stored = stored_name(expression)
        before = made[stored] if stored in made else _empty(expression, tensor)
        made[stored] = _put(expression, tensor.detach(), before).contiguous()
    return made


def save_tensors(tensors: Mapping[str, Tensor], names: TensorMap, file: Path, dtype: torch.dtype | None = None) -> None:
    """Write a model's tensors to a safetensors file as `stored_tensors` has them. dtype: None = as they are."""
    write_tensors(
        file, {name: tensor.to(dtype or tensor.dtype) for name, tensor in stored_tensors(tensors, names).items()}
    )


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it readable for its owner only


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _empty(made: Expression, tensor: Tensor) -> Tensor:
    return tensor.new_zeros(shape_of_stored(made, tuple(tensor.shape)))


def _put(made: Expression, part: Tensor, stored: Tensor) -> Tensor:
    """Return a stored tensor in which the part that an expression reads is replaced."""
    match made:
        case str():
            return part
        case Rows() | Unpaired():
            around = _read(made.of, made.stored_shape(tuple(part.shape)), stored).clone()
            around[made.rows(len(part))] = part
            return _put(made.of, around, stored)
        case Columns():
            around = _read(made.of, made.stored_shape(tuple(part.shape)), stored).clone()
            around[..., made.first : made.first + made.size] = part
            return _put(made.of, around, stored)
        case Stacked():
            around = _read(made.of, made.stored_shape(tuple(part.shape)), stored).clone()
            around[made.index] = part
            return _put(made.of, around, stored)
        case Transposed():
            return _put(made.of, part.t(), stored)
        case Plus():
            return _put(made.of, part - made.number, stored)


def _read(made: Expression, shape: Shape, stored: Tensor) -> Tensor:
    """Return what an expression reads of a stored tensor, of this shape."""
    match made:
        case str():
            return stored
        case Rows() | Unpaired():
            return _read(made.of, made.stored_shape(shape), stored)[made.rows(shape[0])]
        case Columns():
            whole = _read(made.of, made.stored_shape(shape), stored)
            return whole[..., made.first : made.first + made.size]
        case Stacked():
            return _read(made.of, made.stored_shape(shape), stored)[made.index]
        case Transposed():
            return _read(made.of, made.stored_shape(shape), stored).t()
        case Plus():
            return _read(made.of, shape, stored) + made.number
