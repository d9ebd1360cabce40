"""Writes the tensors of a model of any family under the names and in the shapes that its files have.

This is the inverse of reading them (models/weights/source.py): fused tensors are joined again, and others transposed.
"""

from __future__ import annotations

import json
import shutil
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
    open_file,
    open_folder,
    read_description,
    stored_name,
    stored_shape,
)

_INDEX = "model.safetensors.index.json"
_OWN_FILES = ("config.json", "README.md")
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json")


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


def copy_files(source: Path, folder: Path) -> None:
    """Copy the tokenizer and the other files of a model, without weights and files that are written anew."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in _OWN_FILES and not file.name.endswith(_WEIGHT_FILES):
            shutil.copyfile(file, folder / file.name)


def write_index(folder: Path, files: Mapping[str, str], total: int) -> None:
    """Write which file has each tensor. total: the bytes of all."""
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": dict(files)})


def write_joined(source: Path, file: Path, folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the model of `source` to another folder with the tensors of a file, none of its own, among its weights.

    entries: of config.json, beside those of the language model.
    """
    found, added = open_folder(source), open_file(file)
    folder.mkdir(parents=True, exist_ok=True)
    copy_files(source, folder)
    names = {each: each.name for each in found.files}
    if [*names.values()] == ["model.safetensors"]:  # a file of this name is read alone
        names = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    names[file] = f"{file.parent.resolve().name}.safetensors"
    for each, name in names.items():
        shutil.copyfile(each, folder / name)
    places = {**found.places, **added.places}
    total = sum(place.size for place in places.values())
    write_index(folder, {name: names[place.file] for name, place in places.items()}, total)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (config.get("text_config") or config).update(entries)
    write_json(folder / "config.json", config)  # the last: without it nothing loads


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
