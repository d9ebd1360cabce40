"""What a backend is, and how one is chosen when a model is loaded.

A backend is one module with a function `open_backend() -> Backend`; its name is the module's. Another package adds its
own under the entry point group `speculant.models.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from speculant import plugins
from speculant.errors import ConfigError, suggest
from speculant.kernels.base import Sampler
from speculant.models.base import CausalLM
from speculant.models.config import DecoderConfig
from speculant.models.weight_source import WeightSource

KIND = "speculant.models.backends"
AUTO = "auto"
_FIX = 'use kernels="auto" without quantization, device="cpu" and dtype float32 or bfloat16, or see `speculant doctor`.'


class Backend(Protocol):
    """Computes models, and samples on the device that they are on.

    name: its module's. devices: torch's device types; None = all. dtypes: of weights. quantizations: what it can round
    weights to when it loads them. priority: among the backends that can compute a model, "auto" takes the highest.
    row_invariant: a row's result has the same bits, whatever is computed beside it.
    """

    name: str
    devices: Sequence[str] | None
    dtypes: Sequence[torch.dtype]
    quantizations: Sequence[str]
    priority: int
    row_invariant: bool

    @property
    def sampler(self) -> Sampler:
        """What makes distributions and draws."""
        ...

    def why_not(self, config: DecoderConfig) -> str | None:
        """Say what keeps this backend from computing a model, devices and dtypes aside; None if nothing does."""
        ...

    def describe(self) -> str:
        """Return what is worth saying about it on this machine, such as the instruction set; may be empty."""
        ...

    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> CausalLM:
        """Read every tensor of a model once it is needed, drop it, and return the model, ready to run.

        What is held at any time is at most what the model keeps and one tensor of the source.
        """
        ...


def choose_backend(
    wanted: str, quantization: str | None, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Backend, str]:
    """Return the backend that is wanted and possible, and what to say about it.

    wanted is a backend's name, or "auto" for the first one that can compute the model. Raises ConfigError.
    """
    passed_over: dict[str, str] = {}
    for backend in find_backends(wanted, quantization):
        why = why_not(backend, config, dtype, device)
        if why is None:
            return backend, _describe(backend, quantization, passed_over)
        passed_over[backend.name] = why
    raise ConfigError(
        "; ".join(f"the {name} kernels can't compute this model: {why}" for name, why in passed_over.items()), _FIX
    )


def find_backends(wanted: str, quantization: str | None = None, option: str = "quantization") -> list[Backend]:
    """Open the backend that is wanted, or all for "auto", the highest priority first; only those that quantise so.

    option: what the user calls the quantization. Raises ConfigError for an unknown name, and if no backend is left.
    """
    known = plugins.names(KIND)
    if wanted not in (AUTO, *known):
        raise ConfigError(f"kernels={wanted!r} is unknown", suggest(str(wanted), (AUTO, *known)))
    if quantization is None:
        found = [_open(name) for name in known if wanted in (AUTO, name)]
    else:
        found = _quantizing(wanted, quantization, [_open(name) for name in known], option)
    return sorted(found, key=lambda backend: -backend.priority)


def _quantizing(wanted: str, quantization: str, backends: Sequence[Backend], option: str) -> list[Backend]:
    able = [backend for backend in backends if quantization in backend.quantizations]
    if not able:
        known = {name for backend in backends for name in backend.quantizations}
        raise ConfigError(f"{option}={quantization!r} is unknown", suggest(str(quantization), known))
    found = [backend for backend in able if wanted in (AUTO, backend.name)]
    if not found:
        names = " or ".join(backend.name for backend in able)
        raise ConfigError(f"{option}={quantization!r} needs the {names} kernels", 'leave kernels at "auto".')
    return found


def _open(name: str) -> Backend:
    backend: Backend = plugins.load(KIND, name).open_backend()
    return backend


def why_not(backend: Backend, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say what keeps a backend from computing a model; None if nothing does."""
    if (why := backend.why_not(config)) is not None:
        return why
    if backend.devices is not None and device.type not in backend.devices:
        return f"they run on {' and '.join(map(_spoken, backend.devices))} and the device is {device}"
    if dtype not in backend.dtypes:
        return f"they compute {' and '.join(map(_spoken, backend.dtypes))} weights, not {_spoken(dtype)}"
    return None


def _spoken(value: str | torch.dtype) -> str:
    return {"cpu": "the CPU", "cuda": "CUDA"}.get(str(value), str(value).removeprefix("torch."))


def _describe(backend: Backend, quantization: str | None, passed_over: Mapping[str, str]) -> str:
    facts = [fact for fact in (backend.describe(), f"{quantization} weights" if quantization else "") if fact]
    others = [f"not the {name} ones: {why}" for name, why in passed_over.items()]
    return backend.name + "".join(f" ({', '.join(part)})" for part in (facts, others) if part)
