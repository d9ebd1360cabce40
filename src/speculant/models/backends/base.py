"""The interface of a backend, and the choice of one when a model is loaded.

A backend is one module with a function `open_backend() -> Backend`; its name is the module's. Other packages register
theirs under the entry point group `speculant.models.backends`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from speculant import plugins
from speculant.errors import ConfigError, suggest
from speculant.kernels import VERSION, Sampler
from speculant.models.base import CausalLM
from speculant.models.description import DecoderConfig
from speculant.models.weights.source import (
    FLOATS,
    QuantizedBlocks,
    WeightSource,
    counted_kinds,
    has_blocks,
    listed_kinds,
)

KIND = "speculant.models.backends"
AUTO = "auto"
PLAIN, CODED = "plain", "12bit"  # packings
_FIX = 'use kernels="auto" without quantization, device="cpu" and dtype float32 or bfloat16, or see `speculant doctor`.'


def code_versions() -> tuple[int, str]:
    """Return the versions of the code that computes models: the native kernels', and torch's."""
    return VERSION, torch.__version__


class Computes(Protocol):
    """What the engine knows of whatever computes a model.

    quantizations: types that it can round weights to. row_invariant: a row's result has the same bits in every batch.
    """

    @property
    def name(self) -> str:
        """The name, in messages."""
        ...

    @property
    def quantizations(self) -> Sequence[str]:
        """The types that weights can be rounded to."""
        ...

    @property
    def row_invariant(self) -> bool:
        """Whether a row's result has the same bits in every batch."""
        ...

    @property
    def sampler(self) -> Sampler:
        """The sampler: distributions and draws."""
        ...


class Backend(Computes, Protocol):
    """Computes models, and samples on the device that holds them.

    name: that of its module. devices: torch's device types; None = all. dtypes: of weights. quantizations: types that
    it can round weights to when it loads them. layouts: of blocks that it computes with as they are stored; it decodes
    others. priority: "auto" takes the backend of the highest priority that can compute the model. row_invariant: a
    row's result has the same bits in every batch.
    """

    name: str
    devices: Sequence[str] | None
    dtypes: Sequence[torch.dtype]
    quantizations: Sequence[str]
    layouts: Collection[str]
    priority: int
    row_invariant: bool

    def why_not(self, config: DecoderConfig) -> str | None:
        """Return why this backend can't compute a model, devices and dtypes aside; None if it can."""
        ...

    def describe(self) -> str:
        """Return a description of the backend on this machine, such as the instruction set; may be empty."""
        ...

    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> CausalLM:
        """Return a model that is ready to run. Each tensor is read when it is needed and then dropped.

        Peak memory is at most that of the model and of one tensor of the source. If `config.head.tokens` is not empty,
        `lm_head.weight` has one row for each of these tokens, and all others have the logit -infinity.
        """
        ...


class Packing(NamedTuple):
    """How weights are stored, and why. Packings differ in speed and memory; all give the same bits."""

    name: str = PLAIN
    why: str = ""

    def __str__(self) -> str:
        stored = "in 12 bits" if self.name == CODED else "plain"
        return f"{stored} ({self.why})" if self.why else stored


AS_THEY_ARE = Packing()
AS_STORED = Packing(why="each matrix has the type of the file")


@runtime_checkable
class PacksWeights(Protocol):
    """A backend that can store weights in several ways."""

    @property
    def packing(self) -> Packing:
        """How it stores weights."""
        ...

    def packings(self, dtype: torch.dtype) -> Sequence[str]:
        """Return the ways to store weights of a type."""
        ...

    def fastest_packing(
        self, config: DecoderConfig, quantization: str | None, weights: WeightSource | None = None
    ) -> Packing:
        """Return the fastest of several ways to store a model's weights here. weights: None = all have one type."""
        ...

    def with_packing(self, packing: Packing) -> Backend:
        """Return this backend with this way to store the weights of models that it loads."""
        ...


@runtime_checkable
class RoundsWeights(Protocol):
    """A backend that rounds weights as files have them. type_: one of `quantizations`, or a kind such as q4_0."""

    def rounded_kind(self, type_: str, name: str, k: int) -> str:
        """Return the kind that a matrix [n, k] with this name in the model is rounded to, such as Q4_K."""
        ...

    def round(self, kind: str, matrix: Tensor) -> QuantizedBlocks:
        """Return a matrix of finite floats in blocks of a kind."""
        ...

    def for_drafts(self) -> Backend:
        """Return the backend of draft models: its `quantizations` may have other kinds, which are faster."""
        ...


@runtime_checkable
class TimesWeights(Backend, Protocol):
    """A backend that estimates the time and the memory of a pass before the model is loaded."""

    def row_seconds(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        quantizations: Sequence[str | None],
    ) -> list[float]:
        """Estimate the seconds of a pass of one row with weights in each of some types; None = as they are."""
        ...

    def scratch_bytes(self, config: DecoderConfig, rows: int, positions: int) -> int:
        """Estimate `KnowsSizes.scratch_bytes` of a model."""
        ...


class Store(Protocol):
    """The packed weights of one model: those of a cache on disk, and those that were packed."""

    @property
    def mapped_bytes(self) -> int:
        """How much of the model lies in mapped memory, which the system counts as free."""
        ...

    def keep(self) -> str:
        """Keep the weights that were packed, once the model is complete. Returns the origin of its weights."""
        ...


@runtime_checkable
class StoresWeights(Protocol):
    """A backend that can keep packed weights on disk, and map them at the next start."""

    @property
    def store(self) -> Store | None:
        """The weights of the model that it loads; None = they are not kept."""
        ...

    def with_store(self, folder: Path, facts: Sequence[str]) -> Backend:
        """Return this backend, for one model: its packed weights are kept in a folder.

        facts: all that they depend on besides the backend and its version. Weights with other facts are not used.
        """
        ...


def choose_backend(
    wanted: str,
    quantization: str | None,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    weight_packing: str = AUTO,
    weights: WeightSource | None = None,
) -> tuple[Backend, str]:
    """Return a backend that can compute the model, and a description of the choice.

    wanted is a backend's name, or "auto" for the first that can compute the model. weight_packing: how it stores
    weights; "auto" = the fastest way. weights: those of the model; None = they are of `dtype`. Raises ConfigError.
    """
    reasons: dict[str, str] = {}
    for backend in find_backends(wanted, quantization):
        why = why_not(backend, config, dtype, device)
        if why is None:
            packed = _with_packing(backend, weight_packing, config, dtype, quantization, weights)
            return packed, _describe(packed, weights_of(packed, quantization, weights), reasons)
        reasons[backend.name] = why
    raise ConfigError(
        "; ".join(f"the {name} kernels can't compute this model: {why}" for name, why in reasons.items()), _FIX
    )


def packing_of(backend: Computes) -> Packing:
    """Return how a backend stores weights."""
    return backend.packing if isinstance(backend, PacksWeights) else AS_THEY_ARE


def weights_of(backend: Backend, quantization: str | None, weights: WeightSource | None) -> str:
    """Describe the matrices that a backend computes with, if not all of them have the model's type."""
    if quantization is not None:
        return f"{quantization} weights"
    if weights is None or not has_blocks(weights):
        return ""
    decoded = decoded_kinds(backend, weights)
    return listed_kinds(counted_kinds(weights)) + (f", {' and '.join(sorted(decoded))} decoded" if decoded else "")


def decoded_kinds(backend: Backend, weights: WeightSource) -> Counter[str]:
    """Return how many matrices are stored in each kind of blocks that a backend decodes."""
    kinds = counted_kinds(weights).items()
    return Counter({kind: count for kind, count in kinds if kind.upper() not in FLOATS and kind not in backend.layouts})


def _with_packing(
    backend: Backend, wanted: str, config: DecoderConfig, dtype: torch.dtype, quantization: str | None,
    weights: WeightSource | None,
) -> Backend:  # fmt: skip
    known = backend.packings(dtype) if isinstance(backend, PacksWeights) else (PLAIN,)
    if wanted not in (AUTO, *known):
        raise ConfigError(
            f"weight_packing={wanted!r} is impossible for {_display_name(dtype)} weights on the {backend.name} kernels",
            f'use weight_packing="auto" or one of: {", ".join(known)}; 12bit is for bfloat16 on the native kernels.',
        )
    if not isinstance(backend, PacksWeights):
        return backend
    if len(known) == 1:
        return backend.with_packing(AS_STORED) if weights is not None and has_blocks(weights) else backend
    fastest = backend.fastest_packing(config, quantization, weights) if wanted == AUTO else Packing(wanted)
    return backend.with_packing(fastest)


def find_backends(wanted: str, quantization: str | None = None, option: str = "quantization") -> list[Backend]:
    """Open the wanted backend, or all for "auto", highest priority first; only those that have the quantization.

    option: the user's name of the quantization option. Raises ConfigError for an unknown name, or if none is left.
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
    """Return why a backend can't compute a model; None if it can."""
    if (why := backend.why_not(config)) is not None:
        return why
    if backend.devices is not None and device.type not in backend.devices:
        return f"they run on {' and '.join(map(_display_name, backend.devices))} and the device is {device}"
    if dtype not in backend.dtypes:
        return f"they compute {' and '.join(map(_display_name, backend.dtypes))} weights, not {_display_name(dtype)}"
    return None


def _display_name(value: str | torch.dtype) -> str:
    return {"cpu": "the CPU", "cuda": "CUDA"}.get(str(value), str(value).removeprefix("torch."))


def _describe(backend: Backend, weights: str, reasons: Mapping[str, str]) -> str:
    facts = [fact for fact in (backend.describe(), weights) if fact]
    others = [f"not the {name} ones: {why}" for name, why in reasons.items()]
    return backend.name + "".join(f" ({', '.join(part)})" for part in (facts, others) if part)
