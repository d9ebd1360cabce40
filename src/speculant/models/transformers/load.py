"""Loads a model by the package transformers: safetensors alone, and code of a checkpoint is never run."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from speculant.errors import ConfigError, ModelError
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.transformers.decoders import TransformersDecoder
from speculant.models.transformers.probe import choose_decoder

logger = logging.getLogger(__name__)

NAME = "transformers"
INSTALL = 'run: pip install "speculant[transformers]" -c constraints.txt'
_SHOWN = 3  # tensors in a message


@dataclass(frozen=True)
class TransformersBackend:
    """What the engine knows of the backend: see `Computes`. torch may round a row differently in another batch."""

    name: str = NAME
    row_invariant: bool = False
    quantizations: Sequence[str] = ()
    sampler: Sampler = REFERENCE


@dataclass(frozen=True)
class Loaded:
    """A model that transformers computes. description: its class, and how it runs."""

    model: TransformersDecoder
    dtype: torch.dtype
    description: str


def check_installed() -> None:
    """Raise ConfigError unless the package transformers is installed."""
    if find_spec(NAME) is None:
        raise ConfigError(f'model_backend="{NAME}" needs the package {NAME}, which is not installed', INSTALL)


def load_by_transformers(folder: Path, dtype: str, device: torch.device) -> Loaded:
    """Load a model from a folder, and choose how it runs. dtype: "auto" = the files'; float16 becomes float32.

    Raises ConfigError without the package, and ModelError for a model that it can't run.
    """
    check_installed()
    if not folder.is_dir():
        raise ModelError(
            f'{folder} is a GGUF file, and model_backend="{NAME}" reads folders alone',
            "leave model_backend out, or name the folder that the file was made from.",
        )
    model = _loaded(folder, "auto" if dtype == "auto" else getattr(torch, dtype))
    if model.dtype == torch.float16:
        model = model.float()
    decoder, why = choose_decoder(model.to(device).eval().requires_grad_(False))
    version = importlib.import_module(NAME).__version__
    reason = f" ({why})" if why else ""
    return Loaded(decoder, model.dtype, f"{NAME} {version}, {type(model).__name__}, {decoder.how}{reason}")


def _loaded(folder: Path, dtype: Any) -> Any:
    transformers: Any = importlib.import_module(NAME)
    try:
        with _quiet(transformers.utils.logging):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # which errors it raises depends on the model and on its version
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"transformers can't load {folder}: {reason}", "use a model that transformers can load.") from error
    absent = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        raise ModelError(
            f"{folder} lacks weights of {type(model).__name__}, or has them in another shape: "
            f"{', '.join(absent[:_SHOWN])}{more}",
            "use a complete checkpoint of a causal language model.",
        )
    return model


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Show no progress bars and no reports of transformers: errors are raised."""
    shows, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shows:
            log.enable_progress_bar()
