"""The safetensors files of a checkpoint: found, checked against the model, and read one tensor at a time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculant.errors import ModelError
from speculant.models.source import read_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """What a file says about one tensor."""

    file: Path
    shape: tuple[int, ...]
    kind: str  # safetensors' name of the type, such as BF16


@dataclass(frozen=True)
class TensorFiles:
    """A `WeightSource`: all tensors of a checkpoint by name. Nothing but the files' headers is read before `read`."""

    entries: dict[str, Entry]
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Read the headers of the folder's safetensors files. Raises ModelError."""
        entries: dict[str, Entry] = {}
        for file in _find_files(folder):
            entries.update(_read_header(file))
        return cls(entries, folder)

    def common_dtype(self) -> torch.dtype:
        """Return the type that most tensors are stored in."""
        kinds = Counter(entry.kind for entry in self.entries.values())
        return _DTYPES[kinds.most_common(1)[0][0]]

    def names(self) -> Collection[str]:
        """See `WeightSource.names`; without tables that every program can work out itself."""
        return [name for name in self.entries if not _is_harmless(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        return self.entries[name].shape

    def read(self, name: str) -> Tensor:
        """See `WeightSource.read`. The file is mapped for one tensor alone: a mapping keeps what was read in memory."""
        with safe_open(self.entries[name].file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor


def check_tensors(found: TensorFiles, wanted: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> None:
    """Compare the files with the model that config.json describes. Raises ModelError on any difference."""
    shapes = {name: entry.shape for name, entry in found.entries.items() if not _is_harmless(name)}
    _check_layers(shapes, config)
    if "lm_head.weight" in shapes and "lm_head.weight" not in wanted:
        _check_tied_head(found)
        del shapes["lm_head.weight"]
    _check_names(shapes.keys(), wanted.keys(), found.folder)
    _check_shapes(shapes, wanted)
    _check_kinds(found)


def _find_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    if (folder / _INDEX).exists():
        return _find_shards(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} has only pickle weights ({_listed(pickles)}), which can run code when they are opened",
            "convert them to safetensors: load them with transformers and call save_pretrained.",
        )
    raise ModelError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}", "name a folder with safetensors weights, or download it again."
    )


def _find_shards(folder: Path) -> list[Path]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not shards or any(not isinstance(name, str) or Path(name).name != name for name in shards):
        raise ModelError(f"{folder / _INDEX} has no usable weight_map", "download the checkpoint again.")
    missing = sorted(name for name in shards if not (folder / name).exists())
    if missing:
        raise ModelError(f"{folder} lacks {_listed(missing)}, which {_INDEX} lists", "download the checkpoint again.")
    return [folder / name for name in sorted(shards)]


def _read_header(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: Entry(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a readable safetensors file: {error}", "download it again.") from error


def _is_harmless(name: str) -> bool:
    """Whether a tensor is a table that older programs stored and every program can work out itself."""
    return name.endswith("rotary_emb.inv_freq")


def _check_layers(shapes: Iterable[str], config: Mapping[str, Any]) -> None:
    numbers = {int(hit.group(1)) for name in shapes if (hit := re.match(r"model\.layers\.(\d+)\.", name))}
    layers = config["num_hidden_layers"]
    if numbers and numbers != set(range(layers)):
        raise ModelError(
            f"config.json says num_hidden_layers = {layers}, but the weights hold {len(numbers)} layers"
            f" ({min(numbers)} to {max(numbers)})",
            "use the config.json that belongs to these weights, or download the checkpoint again.",
        )


def _check_tied_head(found: TensorFiles) -> None:
    tied = ("lm_head.weight", "model.embed_tokens.weight")
    if found.entries.keys() >= set(tied) and not torch.equal(*(found.read(name) for name in tied)):
        raise ModelError(
            "config.json says tie_word_embeddings = true, but lm_head.weight differs from model.embed_tokens.weight",
            "set tie_word_embeddings to false in config.json if the head was trained on its own.",
        )


def _check_names(found: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing == ["lm_head.weight"] and not unexpected:
        raise ModelError(
            "config.json says tie_word_embeddings = false, but the weights have no lm_head.weight",
            "set tie_word_embeddings to true in config.json, or download the checkpoint again.",
        )
    problems = [
        f"{len(names)} {what} ({_listed(names)})"
        for what, names in (("missing", missing), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ModelError(
            f"the tensors in {folder} are not those that config.json describes: {' and '.join(problems)}",
            "use the config.json that belongs to these weights, or download the checkpoint again.",
        )


def _check_shapes(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        f"{name} is {list(shape)} but config.json asks for {list(wanted[name])}"
        for name, shape in sorted(found.items())
        if shape != wanted[name]
    ]
    if wrong:
        raise ModelError(
            f"the weights do not fit config.json: {_listed(wrong, '; ')}",
            "check vocab_size, hidden_size, intermediate_size, head_dim and the numbers of heads in config.json.",
        )


def _check_kinds(found: TensorFiles) -> None:
    wrong = sorted(f"{name} is {entry.kind}" for name, entry in found.entries.items() if entry.kind not in _DTYPES)
    if wrong:
        raise ModelError(
            f"the weights are stored in a type that is not supported ({_listed(wrong)})",
            "use a checkpoint in float32, bfloat16 or float16.",
        )


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return separator.join(names[:_SHOWN]) + more
