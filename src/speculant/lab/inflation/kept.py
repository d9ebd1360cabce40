"""Models that are made from others for measurements, kept on disk between them: $XDG_CACHE_HOME/speculant/inflated."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from speculant import __version__
from speculant.errors import ConfigError
from speculant.files import cache_folder
from speculant.lab.inflation.decoded import write_decoded
from speculant.lab.inflation.model import inflate
from speculant.lab.inflation.rescaled import write_rescaled
from speculant.lab.inflation.shapes import Shape


def kept_model(source: Path, label: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of a model that is made from `source`, a folder or a file; it is written if it is missing.

    label: names what is made of the source. write: makes it in the folder that it is given, config.json last.
    Raises ConfigError if the folder can't be written.
    """
    name = source.resolve().name.removesuffix(".gguf").removeprefix(f"{__version__}-")
    folder = cache_folder("inflated") / f"{__version__}-{name}-{label}-{_digest(source)}"
    if not (folder / "config.json").exists():
        try:
            _make(folder, write)
        except OSError as error:
            if not (folder / "config.json").exists():  # another process may have been faster
                raise ConfigError(f"{folder} can't be written: {error}", "make room, or set XDG_CACHE_HOME.") from error
    return folder


def decoded_model(source: Path) -> Path:
    """Return the folder of the model in a GGUF file, decoded to bfloat16."""
    return kept_model(source, "decoded", partial(write_decoded, source))


def rescaled_model(source: Path) -> Path:
    """Return the folder of a model's function with weights that lie on no grid, in bfloat16; see `write_rescaled`."""
    return kept_model(source, "off-grid", partial(write_rescaled, source))


def inflated_model(source: Path, shape: Shape, noise: float = 0.0) -> Path:
    """Return the folder of a model at a larger shape or at its own; see `inflate`."""
    sizes = "x".join(map(str, (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers)))
    return kept_model(source, f"{sizes}-noise-{noise:g}", lambda folder: inflate(source, folder, shape, noise))


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a model under a temporary name, and rename it when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write(made)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _digest(source: Path) -> str:
    """Return a digest of a model's weights and configuration, or of a file."""
    digest = hashlib.sha256()
    for file in sorted([*source.glob("*.json"), *source.glob("*.safetensors")]) if source.is_dir() else [source]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
