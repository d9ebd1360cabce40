"""Writes a quantised checkpoint, whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from speculant.errors import ConfigError
from speculant.lab.quantize.check import check_model, check_tokenizer
from speculant.lab.quantize.folder import write_folder
from speculant.lab.quantize.gguf import read_file, read_folder, write_gguf
from speculant.models import RoundsWeights, find_backends

TYPES = ("int4", "int8", "q8_0", "q4_0")


def quantize(source: Path, out: Path, type_: str, begin: Callable[[str], None], *, replace: bool = False) -> int:
    """Write a model to a .gguf file or else a folder, and return its bytes.

    source: a folder or a GGUF file with floating-point weights. begin: called with the name of each tensor. replace:
    whether existing files are replaced. Raises ConfigError or ModelError.
    """
    backend = next((each for each in find_backends("native") if isinstance(each, RoundsWeights)), None)
    assert backend is not None, "the native kernels round"
    _check_place(source, out, replace)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        if _is_file(out):
            model = read_folder(source) if source.is_dir() else read_file(source)
            write_gguf(model, type_, backend, Path(made) / out.name, begin, partial(_check, source))
            (Path(made) / out.name).replace(out)
            return out.stat().st_size
        if not source.is_dir():
            raise ConfigError("a GGUF file can't be written as a folder", "name a file OUT.gguf.")
        write_folder(source, type_, backend, Path(made), begin)
        return _move_all(Path(made), out)


def _check(source: Path, file: Path) -> None:
    check_model(source, file)
    check_tokenizer(source, file)


def _is_file(out: Path) -> bool:
    return out.suffix.lower() == ".gguf"


def _check_place(source: Path, out: Path, replace: bool) -> None:
    if out.exists() and out.samefile(source):
        raise ConfigError(f"{out} is the model itself", "name another place.")
    if out.is_dir() == _is_file(out) and out.exists():
        raise ConfigError(f"{out} is {'a folder' if out.is_dir() else 'a file'}", "name another place.")
    if not replace and out.exists() and (_is_file(out) or any(out.iterdir())):
        raise ConfigError(f"{out} exists", "name another place, or add --force to replace it.")


def _move_all(made: Path, out: Path) -> int:
    """Move files into a folder, config.json last, and return their bytes."""
    out.mkdir(exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)  # until all other files are there, nothing loads
    files = sorted(made.iterdir(), key=lambda file: file.name == "config.json")
    size = sum(file.stat().st_size for file in files)
    for file in files:
        shutil.move(file, out / file.name)
    return size
