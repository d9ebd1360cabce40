"""A checkpoint in Hugging Face format becomes a model: config, then tensors, checked before they are read."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculant import plugins
from speculant.errors import ConfigError, ModelError, suggest
from speculant.kernels.native import QUANTIZED, Kernels, open_kernels
from speculant.models.base import CausalLM
from speculant.models.decoder import Decoder
from speculant.models.native_decoder import NativeDecoder, why_not_native
from speculant.models.source import read_json, resolve_source
from speculant.models.tensors import TensorFiles, check_tensors

logger = logging.getLogger(__name__)

_FAMILIES = "speculant.models"
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = {**_DTYPES, "float16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to run, and what its folder says about it."""

    model: CausalLM  # in eval mode, without gradients
    config: dict[str, Any]  # config.json as it is
    folder: Path
    dtype: torch.dtype
    eos_token_ids: frozenset[int]  # empty when the checkpoint names none
    generation: dict[str, Any]  # generation_config.json as it is; empty when there is none
    name: str
    kernels: str = "reference"  # what computes it, and why not the native ones if they were wanted
    native: Kernels | None = None  # the native kernels, if they compute it


def load_model(
    source: str,
    dtype: str = "auto",
    device: str = "cpu",
    *,
    role: str = "target",
    revision: str | None = None,
    kernels: str = "reference",
    quantization: str | None = None,
) -> Checkpoint:
    """Load a checkpoint from a folder, a Hugging Face id or "demo" (of which `role` picks a half).

    kernels is reference, native, or auto: native where they can compute the model. quantization is
    int8, int4 or None, and needs the native ones.

    dtype "auto" takes the checkpoint's own type; float16 becomes float32 on the CPU. No code and no
    pickle from a checkpoint is ever run. Raises ModelError for whatever is wrong with the checkpoint,
    ConfigError for a wrong dtype or device.
    """
    started = time.perf_counter()
    _check_choices(dtype, device)
    folder = resolve_source(source, role, revision)
    config = read_json(folder / "config.json")
    model = _empty_model(config)
    tensors = TensorFiles.open(folder)
    check_tensors(tensors, _shapes(model), config)
    chosen = _choose_dtype(dtype, config, tensors, device)
    _fill(model, tensors.read(chosen, torch.device(device)))
    computing, says = _choose_kernels(model, kernels, quantization)
    native = computing.kernels if isinstance(computing, NativeDecoder) else None
    generation = _read_optional(folder / "generation_config.json")
    ends = _eos_token_ids(generation, config)
    name, seconds = _name(source, role, folder), time.perf_counter() - started
    logger.info("%s %s: %s, loaded in %.2f s, kernels: %s", role, name, chosen, seconds, says)
    return Checkpoint(computing, config, folder, chosen, ends, generation, name, says, native)


def _check_choices(dtype: str, device: str) -> None:
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype {dtype!r} is not supported", suggest(dtype, ("auto", *_DTYPES)))
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown", "use 'cpu' or 'cuda'.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for but torch sees no CUDA device", "use device='cpu'.")


def _empty_model(config: Mapping[str, Any]) -> Decoder:
    """Make the model without memory for its parameters."""
    family = config.get("model_type")
    if family not in (known := plugins.names(_FAMILIES)):
        raise _unknown_family(config, known)
    if "quantization_config" in config or "compression_config" in config:
        raise ModelError(
            "this checkpoint is quantised, which is not supported yet", "use the unquantised checkpoint it came from."
        )
    with torch.device("meta"):
        return Decoder(plugins.load(_FAMILIES, family).read_config(config))


def _unknown_family(config: Mapping[str, Any], known: list[str]) -> ModelError:
    family = config.get("model_type")
    if family is None:
        return ModelError("config.json names no model_type", f"name one of: {', '.join(known)}.")
    own_code = " and wants to run code of its own (auto_map), which is never done" if "auto_map" in config else ""
    return ModelError(f"model_type {family!r} is unknown{own_code}", suggest(str(family), known))


def _shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a file must hold; a tied head is not stored."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _choose_dtype(dtype: str, config: Mapping[str, Any], tensors: TensorFiles, device: str) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    named = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    stored = _STORED.get(named, tensors.common_dtype())
    return torch.float32 if stored == torch.float16 and device == "cpu" else stored


def _fill(model: Decoder, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_head()
    model.eval().requires_grad_(False)


def _choose_kernels(decoder: Decoder, wanted: str, quantization: str | None) -> tuple[CausalLM, str]:
    """Return the model on the kernels that are wanted and possible, and what to say about them."""
    if wanted == "reference":
        return decoder, "reference"
    shape = decoder.cache_shape
    kernels, why = open_kernels(), why_not_native(decoder.config, shape.dtype, shape.device)
    if kernels is None:
        why = "they were not built"
    if kernels is not None and why is None:
        weights = f", {quantization} weights" if quantization else ""
        says = f"native ({kernels.isa}, {kernels.threads} threads{weights})"
        return NativeDecoder(decoder, kernels, QUANTIZED[quantization] if quantization else None), says
    if wanted == "native" or quantization:
        raise ConfigError(f"the native kernels can't compute this model: {why}", _NATIVE_FIX)
    return decoder, f"reference (not the native ones: {why})"


_NATIVE_FIX = (
    'use kernels="auto" without quantization, device="cpu" and dtype float32 or bfloat16, or see `speculant doctor`.'
)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    """Return the end tokens; generation_config.json has the last word, as it lists the chat ones too."""
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, list) else [ends])


def _name(source: str, role: str, folder: Path) -> str:
    if source == "demo":
        return f"demo/{role}"
    return folder.resolve().name if Path(source).expanduser().is_dir() else source
