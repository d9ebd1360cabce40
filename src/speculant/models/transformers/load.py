"""Loads a model with the package transformers, from safetensors alone. A checkpoint's code is never run."""

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

from speculant.config import MODEL_BACKENDS
from speculant.errors import ConfigError, Converts, ModelError, suggest
from speculant.kernels import REFERENCE, Sampler
from speculant.models.backends.base import AUTO, PLAIN
from speculant.models.transformers.decoders import TransformersDecoder
from speculant.models.transformers.probe import choose_decoder
from speculant.models.vocabulary import TargetVocabulary

logger = logging.getLogger(__name__)

NAME = "transformers"
INSTALL = 'run: pip install "speculant[transformers]" -c constraints.txt'
_ANOTHER = f"use a causal language model that this version of {NAME} runs, with safetensors weights."
_SHOWN = 3  # tensors in a message


@dataclass(frozen=True)
class TransformersBackend:
    """The facts about the backend; see `Computes`. torch may round a row differently in another batch."""

    name: str = NAME
    row_invariant: bool = False
    quantizations: Sequence[str] = ()
    sampler: Sampler = REFERENCE


@dataclass(frozen=True)
class LoadedByTransformers:
    """A model that transformers computes. description: its class, and how it runs."""

    model: TransformersDecoder
    dtype: torch.dtype
    description: str
    backend: TransformersBackend = TransformersBackend()


def check_options(model_backend: str, quantization: str | None, weight_packing: str, kv_cache_dtype: str) -> None:
    """Check the options of a model before its files are looked up. Raises ConfigError.

    For transformers, the package must be installed, and weights, keys and values can't be rounded or packed.
    """
    if model_backend not in MODEL_BACKENDS:
        raise ConfigError(f"model_backend={model_backend!r} is unknown", suggest(str(model_backend), MODEL_BACKENDS))
    if model_backend == AUTO:
        return
    if find_spec(NAME) is None:
        raise ConfigError(f'model_backend="{NAME}" needs the package {NAME}, which is not installed', INSTALL)
    if quantization is not None:
        raise ConfigError(
            f'weights can\'t be rounded to {quantization} with model_backend="{NAME}"',
            "leave out the quantization, or the backend.",
        )
    if weight_packing not in (AUTO, PLAIN):
        raise ConfigError(
            f'weight_packing={weight_packing!r} is impossible with model_backend="{NAME}"',
            f'use "{AUTO}" or "{PLAIN}".',
        )
    if kv_cache_dtype != AUTO:
        raise ConfigError(
            f'kv_cache_dtype={kv_cache_dtype!r} is impossible with model_backend="{NAME}", which stores keys and values'
            " in the model's type",
            "leave out one of the two.",
        )


def load_by_transformers(
    folder: Path,
    dtype: str,
    device: torch.device,
    head_tokens: tuple[int, ...] = (),
    vocabulary: TargetVocabulary | None = None,
) -> LoadedByTransformers:
    """Load a model from a folder, and choose how it runs; the arguments are those of `load_model`.

    Raises ModelError for a model that transformers can't run.
    """
    if not folder.is_dir():
        raise ModelError(
            f'{folder} is a GGUF file, and model_backend="{NAME}" reads folders alone',
            "leave model_backend out, or name the folder that the file was made from.",
        )
    model = _loaded(folder, "auto" if dtype == "auto" else getattr(torch, dtype))
    if model.dtype == torch.float16:
        model = model.float()
    kind, version = type(model).__name__, importlib.import_module(NAME).__version__
    with Converts(ModelError, f"{NAME} {version} can't run {kind} on texts", _ANOTHER), _quiet():
        decoder, why = choose_decoder(model.to(device).eval().requires_grad_(False))
    decoder.draw_among(head_tokens, vocabulary)
    reason = f", because {why}" if why else ""
    return LoadedByTransformers(decoder, model.dtype, f"{NAME} {version} ({kind}, {decoder.how}{reason})")


def _loaded(folder: Path, dtype: Any) -> Any:
    transformers: Any = importlib.import_module(NAME)
    try:
        with _quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # which errors it raises depends on the model and on its version
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(f"{NAME} can't load {folder}: {reason}", _ANOTHER) from error
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
def _quiet() -> Iterator[None]:
    """Hide progress bars and reports of transformers; errors are raised anyway."""
    log: Any = importlib.import_module(NAME).utils.logging
    shows, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shows:
            log.enable_progress_bar()
