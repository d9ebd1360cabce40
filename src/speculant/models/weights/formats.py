"""Checkpoints in formats that can't be read: each is refused with the name of its format and what helps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speculant.errors import ModelError
from speculant.models.fields import show

_ROUNDS = '--quantization int4 (in Python quantization="int4") rounds it to 4 bits while it is loaded.'
_MOST_NAME, _MOST_BITS = 60, 100  # that are shown
_SUFFIX = ".gguf"
_GGUF_NAME = re.compile(r"[^/]*/?[^/]*gguf[^/]*", re.IGNORECASE)  # a hub id, perhaps with llama.cpp's ":Q4_K_M"
_READABLE = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")  # these have errors of their own


def quantised_format(config: Mapping[str, Any]) -> str | None:
    """Return the name of the format that a config.json says its weights are quantised in; None = they are not.

    A null entry counts as absent.
    """
    for key, usual in (("quantization_config", None), ("compression_config", "compressed-tensors")):
        entry = config.get(key)
        if entry is not None:
            named = _name_of(entry) if isinstance(entry, dict) else None
            return named or usual or f"{key} does not name the format"
    return None


def _name_of(entry: Mapping[str, Any]) -> str | None:
    """Return the format that a quantization config names, with its bits."""
    named = next((entry[key] for key in ("quant_method", "quant_algo") if entry.get(key) is not None), None)
    loaded = next((bits for bits in (4, 8) if entry.get(f"load_in_{bits}bit") is True), None)  # by bitsandbytes
    bits = loaded if entry.get("bits") is None else entry["bits"]
    if named is None and loaded is None:
        return None
    name = "bitsandbytes" if named is None else named if isinstance(named, str) else show(named)
    return name[:_MOST_NAME] + (f", {bits} bits" if isinstance(bits, int) and 1 < bits < _MOST_BITS else "")


def check_unquantised(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a checkpoint whose config.json says that its weights are quantised."""
    name = quantised_format(config)
    if name is not None:
        raise ModelError(
            f"this checkpoint is quantised ({name}), and quantised checkpoints can't be read yet",
            f"name the unquantised checkpoint that it was made from; {_ROUNDS}",
        )


def check_not_gguf(source: str) -> None:
    """Raise ModelError for the path or URL of a GGUF file, or a folder whose weights are GGUF files alone."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(each.name for each in path.iterdir() if each.name.lower().endswith(_SUFFIX))
        if files and not has_weights(path):
            raise gguf_error(f"{source} holds GGUF files alone ({files[0]}{', ...' if files[1:] else ''})")
    elif source.lower().endswith(_SUFFIX) or _begins_as_gguf(path):
        raise gguf_error(f"{source} is a GGUF file")


def is_named_gguf(source: str) -> bool:
    """Whether a hub id is named as repositories of GGUF files are, or has one of llama.cpp's tags."""
    return _GGUF_NAME.fullmatch(source) is not None


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights in another format than GGUF."""
    return any(any(folder.glob(pattern)) for pattern in _READABLE)


def gguf_error(problem: str) -> ModelError:
    """Return the error for weights in GGUF; `problem` says where they are."""
    return ModelError(
        f"{problem}, the format of llama.cpp, which can't be read yet",
        f"name the checkpoint with safetensors that the GGUF file was made from; {_ROUNDS}",
    )


def _begins_as_gguf(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # not allowed to read it
        return False


def unknown_family(config: Mapping[str, Any], known: Sequence[str]) -> ModelError:
    """Return the error for a config.json whose model_type is no known family.

    It suggests the family whose class config.json names under `architectures`, which a misspelt model_type leaves as it
    is. Another family with a similar name would compute something else.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        return ModelError("config.json names no model_type", f"name one of: {', '.join(known)}.")
    use = f"use a checkpoint of one of these families: {', '.join(known)}."
    if config.get("auto_map") is not None:
        own_code = "and wants to run code of its own (auto_map), which is never done"
        return ModelError(f"model_type {show(family)} is unknown {own_code}", use)
    meant = _named_class(config, known)
    advice = f"did you mean {meant!r}? config.json names its class under architectures. Else " if meant else ""
    return ModelError(f"model_type {show(family)} is no family that is implemented", advice + use)


def _named_class(config: Mapping[str, Any], known: Sequence[str]) -> str | None:
    named = config.get("architectures")
    classes = {name.lower() for name in named if isinstance(name, str)} if isinstance(named, list) else set()
    return next((family for family in known if f"{family.replace('_', '')}forcausallm" in classes), None)
