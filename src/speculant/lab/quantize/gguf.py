"""Writes a quantised model as a GGUF file. One tensor at a time is in memory.

The blocks are those that the engine makes when it rounds the weights itself, except that all matrices of a fused
tensor, such as attn_qkv, have one type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray
from torch import Tensor

from speculant.errors import ModelError
from speculant.files import read_json
from speculant.gguf_file import GgufFile
from speculant.lab.quantize.entries import rope_tensors, sampled_entries, start_entries
from speculant.lab.quantize.layouts import LAYOUTS, GgufLayout, described, stored_tensors
from speculant.lab.quantize.vocabulary import end_entries, tokenizer_entries
from speculant.models import (
    CheckpointFiles,
    DecoderConfig,
    GgufWeights,
    RoundsWeights,
    WeightSource,
    read_plain,
    stored_name,
    tensor_shapes,
)

_ROLES = {  # names in the model by names in the file; attn_qkv has a type between those of queries and values
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "attn_v": "v_proj",
    "attn_qkv": "o_proj",
    "attn_output": "o_proj",
    "attn_o": "o_proj",
    "cross_attn_v": "v_proj",
    "cross_attn_o": "o_proj",
    "ffn_down": "down_proj",
    "ffn_down_exps": "down_proj",
}
_PLAIN = ("ffn_gate_inp", "position_embd", "per_layer_token_embd", "attn_rel_b")  # matrices that are not rounded
_ARCHITECTURE = "general.architecture"
_OWN = (
    "GGUF.",
    _ARCHITECTURE,
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
    "split.",
)  # prefixes of entries that are written anew
_DESCRIBES = "rope_"  # begins the names of tensors that are part of the description, and are written first
_FILE_TYPES = {"int4": 15, "int8": 7, "q8_0": 7, "q4_0": 2}  # llama.cpp's numbers for the type of most tensors


class Entry(NamedTuple):
    """A value of the metadata, its type, and that of its elements if it is an array; None = by the values."""

    value: Any
    type: GGUFValueType
    element: GGUFValueType | None = None


class StoredTensor(NamedTuple):
    """A tensor that is read when it is written."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class GgufModel:
    """The content of a GGUF file."""

    entries: Mapping[str, Entry]
    tensors: Mapping[str, StoredTensor]


def read_folder(folder: Path) -> GgufModel:
    """Return the content of a GGUF file with a folder's model. Raises ModelError for a model that can't be written."""
    family = read_json(folder / "config.json").get("model_type")
    layout = LAYOUTS.get(str(family))
    if layout is None:
        raise ModelError(
            f"models of the type {family!r} are not written as GGUF files",
            f"name a folder as OUT, or use one of: {', '.join(sorted(LAYOUTS))}.",
        )
    checked = CheckpointFiles.open(folder)
    config, files, decoder = checked.config, checked.tensors, checked.decoder
    names = {
        stored_name(decoder.tensors.expression(name)) for name in tensor_shapes(decoder)
    }  # unused tensors are left out
    if files.quantised_kinds() or any(len(files.shape(name)) > 2 for name in names):
        raise ModelError(f"{folder} has weights that are quantised or stacked", "use the checkpoint it was made from.")

    def reading(own: list[str]) -> Callable[[], Tensor]:
        def read() -> Tensor:
            found = [layout.stored(name, read_plain(files, name), decoder.attention) for name in own]
            return found[0] if len(found) == 1 else torch.stack(found)

        return read

    tensors = {
        name: StoredTensor(_shape(own, files, layout), reading(own))
        for name, own in stored_tensors(names, layout).items()
    }
    if decoder.encoder is not None and decoder.head.scale == 1:  # readers scale the logits of a file without a head
        tensors.setdefault("output.weight", tensors["token_embd.weight"])
    rope = {
        name: StoredTensor(values.shape, partial(torch.from_numpy, values))
        for name, values in rope_tensors({**layout.defaults, **config}, decoder).items()
    }
    start = {f"{layout.architecture}.{key}": each for key, each in start_entries(folder, config, decoder).items()}
    entries = {**described(config, decoder), **start, **sampled_entries(folder), **text_entries(folder, decoder)}
    return GgufModel({key: _typed(value) for key, value in entries.items()}, tensors | rope)


def text_entries(folder: Path, decoder: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of a folder's tokenizer and end tokens. Raises ModelError if it can't be written."""
    found = tokenizer_entries(folder, decoder.vocab_size)
    return {**found, **end_entries(folder, found)}


def read_file(path: Path) -> GgufModel:
    """Return the content of a GGUF file. Raises ModelError if its weights are quantised."""
    file = GgufFile.open(path)
    weights = GgufWeights(file)
    if kinds := weights.quantised_kinds():
        raise ModelError(
            f"{path} has quantised weights ({', '.join(kinds)}), and rounding them again loses more",
            "use a file or a folder with floating-point weights.",
        )
    tensors = {name: StoredTensor(weights.shape(name), partial(read_plain, weights, name)) for name in file.tensors}
    fields = {name: each for name, each in GGUFReader(path).fields.items() if not name.startswith(_OWN)}
    entries = {name: Entry(each.contents(), each.types[0], each.types[-1]) for name, each in fields.items()}
    return GgufModel({_ARCHITECTURE: _typed(file.metadata[_ARCHITECTURE]), **entries}, tensors)


def write_gguf(
    model: GgufModel,
    type_: str,
    backend: RoundsWeights,
    out: Path,
    begin: Callable[[str], None],
    check: Callable[[Path], None],
) -> None:
    """Write a file with rounded weights. type_: see `RoundsWeights`. begin: called with the name of each tensor.

    check: called with the file when all but its weights is there, so that an error costs no time.
    """
    writer = GGUFWriter(out, model.entries[_ARCHITECTURE].value)
    for key, entry in model.entries.items():
        if key != _ARCHITECTURE:
            writer.add_key_value(key, entry.value, entry.type, entry.element)
    writer.add_file_type(_FILE_TYPES[type_])
    writer.add_quantization_version(2)
    names = sorted(model.tensors, key=lambda name: not name.startswith(_DESCRIBES))
    kinds = {name: _kind(name, model.tensors[name], type_, backend) for name in names}
    size = 0
    for name in names:
        weights, of_block = GGML_QUANT_SIZES[kinds[name]]
        *rows, width = model.tensors[name].shape
        shape = (*rows, width // weights * of_block)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[name])
        size += GGUFWriter.ggml_pad(math.prod(shape), writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    os.truncate(out, GGUFWriter.ggml_pad(out.stat().st_size, writer.data_alignment) + size)
    first = next(name for name in names if not name.startswith(_DESCRIBES))
    for name in names:
        if name == first:
            writer.flush()
            check(out)
        begin(name)
        writer.write_tensor_data(_bytes(model.tensors[name].read(), kinds[name], backend, name))
    writer.close()


def _kind(name: str, tensor: StoredTensor, type_: str, backend: RoundsWeights) -> GGMLQuantizationType:
    """Return the kind of a tensor: that of its role, or float32 for vectors and matrices that are not rounded."""
    part = name.split(".")[-2]
    if len(tensor.shape) < 2 or part in _PLAIN:
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[backend.rounded_kind(type_, _ROLES.get(part, part), tensor.shape[-1])]
    divides = tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
    return kind if divides else GGMLQuantizationType.F32


def _bytes(tensor: Tensor, kind: GGMLQuantizationType, backend: RoundsWeights, name: str) -> NDArray[np.uint8]:
    if kind == GGMLQuantizationType.F32:
        return tensor.float().contiguous().numpy().view(np.uint8)
    if not bool(tensor.isfinite().all()):
        raise ModelError(f"{name} has weights that are NaN or infinite", "download the checkpoint again.")
    return backend.round(kind.name, tensor.reshape(-1, tensor.shape[-1])).blocks.numpy()


def _shape(own: Sequence[str], files: WeightSource, layout: GgufLayout) -> tuple[int, ...]:
    shape = files.shape(own[0])
    shape = shape[::-1] if layout.is_turned(own[0]) else shape
    return (len(own), *shape) if len(own) > 1 else shape


def _typed(value: Any) -> Entry:
    """Return an entry with the type that readers expect. Bytes are an array."""
    if isinstance(value, bytes):
        return Entry(value, GGUFValueType.ARRAY, GGUFValueType.UINT8)
    if isinstance(value, int) and not isinstance(value, bool):
        return Entry(value, GGUFValueType.UINT32)
    return Entry(value, GGUFValueType.get_type(value))
