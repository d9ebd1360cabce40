"""The embedded models at a larger shape, kept on disk between measurements."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from speculant import __version__
from speculant.errors import ConfigError, suggest
from speculant.files import cache_folder
from speculant.lab.inflation.heads import head_kind, head_shape, inflate_head
from speculant.lab.inflation.model import inflate, shape_of
from speculant.lab.inflation.shapes import named_shape
from speculant.models.source import resolve_source

SHAPES = {"1b": "50m", "3b": "50m"}  # of a target, and of the draft model beside it


def inflated_pair(shape: str) -> tuple[Path, Path]:
    """Return the folders of target and draft model, which are written if they are missing: 2 GiB for "1b".

    They are in $XDG_CACHE_HOME/speculant/inflated, ~/.cache by default. Raises ConfigError for another shape.
    """
    _check(shape)
    target, draft = (resolve_source("demo", role) for role in ("target", "draft"))
    return _kept(target, shape), _kept(draft, SHAPES[shape])


def inflated_head(head: str | Path, shape: str) -> Path:
    """Return the folder of a head of the embedded target, inflated for the target of `inflated_pair`.

    head: the method of an embedded head, or a folder. Raises SpeculantError for one that can't be inflated.
    """
    _check(shape)
    return _kept(head if isinstance(head, Path) else resolve_source("demo", f"heads/{head}"), shape)


def _check(shape: str) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"there is no pair of the shape {shape!r}", suggest(shape, SHAPES))


def _kept(source: Path, shape: str) -> Path:
    folder = cache_folder("inflated") / f"{__version__}-{source.resolve().name}-{shape}-{_digest(source)}"
    if not (folder / "config.json").exists():
        try:
            _make(source, shape, folder)
        except OSError as error:
            if not (folder / "config.json").exists():  # another process may have been faster
                raise ConfigError(f"{folder} can't be written: {error}", "make room, or set XDG_CACHE_HOME.") from error
    return folder


def _make(source: Path, shape: str, folder: Path) -> None:
    """Write a model under a temporary name, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write(source, made, shape)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _digest(source: Path) -> str:
    """Return a digest of a model's weights and configuration."""
    digest = hashlib.sha256()
    for file in sorted([*source.glob("*.json"), *source.glob("*.safetensors")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _write(source: Path, folder: Path, shape: str) -> None:
    is_head = head_kind(source) is not None
    _, head_dim = head_shape(source) if is_head else shape_of(source)
    (inflate_head if is_head else inflate)(source, folder, named_shape(shape, head_dim))
