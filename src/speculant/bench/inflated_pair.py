"""The embedded pair at a larger shape, kept on disk between measurements."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from speculant import __version__
from speculant.bench.inflation import inflate, shape_of
from speculant.bench.model_shapes import named_shape
from speculant.errors import ConfigError, suggest
from speculant.files import cache_folder
from speculant.models.source import resolve_source

SHAPES = {"1b": "50m", "3b": "50m"}  # of a target, and of the draft model beside it


def inflated_pair(shape: str) -> tuple[Path, Path]:
    """Return the folders of target and draft, which are written if they are not there: 2 GiB for "1b".

    They lie in $XDG_CACHE_HOME/speculant/inflated, ~/.cache by default. Raises ConfigError for another shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"there is no pair of the shape {shape!r}", suggest(shape, SHAPES))
    return _kept("target", shape), _kept("draft", SHAPES[shape])


def _kept(role: str, shape: str) -> Path:
    root = cache_folder("inflated")
    folder = root / f"{__version__}-{role}-{shape}"
    if not (folder / "config.json").exists():
        source = resolve_source("demo", role)
        _, head_dim = shape_of(source)
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root))
        try:
            inflate(source, made, named_shape(shape, head_dim))
            made.rename(folder)
        except OSError as error:
            if not (folder / "config.json").exists():  # another process may have been faster
                raise ConfigError(f"{folder} can't be written: {error}", "make room, or set XDG_CACHE_HOME.") from error
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder
