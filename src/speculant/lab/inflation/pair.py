"""The embedded models at a larger shape, kept on disk between measurements."""

from __future__ import annotations

from pathlib import Path

from speculant.errors import ConfigError, suggest
from speculant.lab.inflation.heads import head_kind, head_shape, inflate_head
from speculant.lab.inflation.kept import kept_model
from speculant.lab.inflation.model import inflate, shape_of
from speculant.lab.inflation.shapes import named_shape
from speculant.models import resolve_source

SHAPES = {"1b": "50m", "3b": "50m"}  # of a target, and of the draft model beside it


def inflated_pair(shape: str, draft: Path | None = None) -> tuple[Path, Path]:
    """Return the folders of target and draft model, which are written if they are missing: 2 GiB for "1b".

    draft: another draft for the embedded target; None = the embedded one. They are in
    $XDG_CACHE_HOME/speculant/inflated, ~/.cache by default. Raises ConfigError for another shape.
    """
    _check(shape)
    own = resolve_source("demo", "draft") if draft is None else draft
    return _kept(resolve_source("demo", "target"), shape), _kept(own, SHAPES[shape])


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
    return kept_model(source, shape, lambda folder: _write(source, folder, shape))


def _write(source: Path, folder: Path, shape: str) -> None:
    is_head = head_kind(source) is not None
    _, head_dim = head_shape(source) if is_head else shape_of(source)
    (inflate_head if is_head else inflate)(source, folder, named_shape(shape, head_dim))
