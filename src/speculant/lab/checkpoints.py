"""Writes the tensors of a model of any family under the names and in the shapes that its files have.

This is the inverse of reading them (models/weights/source.py): fused tensors are joined again, and others transposed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculant.models import (
    Columns,
    DecoderConfig,
    Expression,
    Flattened,
    LogOfNegative,
    Plus,
    RowOperation,
    Shape,
    Stacked,
    TensorMap,
    Transposed,
    Unsqueezed,
    UntiledColumns,
    read_description,
    stored_name,
    stored_shape,
)


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
        if isinstance(expression, str):
            made[stored] = tensor.detach().contiguous()
            continue
        if stored not in made:
            made[stored] = tensor.new_zeros(stored_shape(expression, tuple(tensor.shape)))
        _put(expression, tensor.detach(), made[stored])
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


def _put(made: Expression, part: Tensor, stored: Tensor) -> None:
    """Write what an expression reads of a stored tensor."""
    place, dim, chosen, undo = _place(made, tuple(part.shape), stored)
    index = [slice(None) if chosen is None or each != dim else chosen for each in range(place.ndim)]
    place[tuple(index)] = undo(part)


class _Place(NamedTuple):
    """The part of a stored tensor that an expression reads: indices of a dimension, None = all.

    undo: makes the stored numbers of those that the expression gives.
    """

    view: Tensor
    dim: int
    chosen: Sequence[int] | None
    undo: Callable[[Tensor], Tensor]


def _place(made: Expression, shape: Shape, stored: Tensor) -> _Place:
    """Return the part that an expression reads, from the shape of its result."""
    if isinstance(made, str):
        return _Place(stored, 0, None, lambda part: part)
    view, dim, chosen, undo = of = _place(made.of, made.stored_shape(shape), stored)
    match made:
        case RowOperation():
            own = made.rows(shape[0])
            assert chosen is None or dim == 0, "one dimension alone is divided by indices"
            return of._replace(dim=0, chosen=own if chosen is None else [chosen[row] for row in own])
        case Columns():
            assert chosen is None or dim == 0, "one dimension alone is divided by indices"
            return of._replace(view=view[..., made.first : made.first + made.size])
        case Stacked():
            assert chosen is None, "stacked tensors are whole"
            return of._replace(view=view[made.index])
        case UntiledColumns():
            assert chosen is None, "one dimension alone is divided by indices"
            return of._replace(dim=view.ndim - 1, chosen=made.columns(view.shape[-1]))
        case Transposed():
            return of._replace(view=view.t(), dim=view.ndim - 1 - dim)
        case Unsqueezed():
            return of._replace(view=view.unsqueeze(1) if view.ndim == 2 else view)
        case Flattened():
            return of._replace(view=view.view(-1))
        case LogOfNegative():
            return of._replace(undo=lambda part: undo(-part.exp()))
    assert isinstance(made, Plus)
    return of._replace(undo=lambda part: undo(part - made.number))
