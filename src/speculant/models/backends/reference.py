"""Plain PyTorch, on any device: the definition of correct."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from speculant.kernels import REFERENCE, Sampler
from speculant.models.backends.base import Backend
from speculant.models.description import DecoderConfig
from speculant.models.reference import Decoder, fill
from speculant.models.weights.source import WeightSource


@dataclass(frozen=True)
class ReferenceBackend(Backend):
    """See `Backend`. torch's kernels may round a row differently in another batch."""

    name: str = "reference"
    devices: Sequence[str] | None = None
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16)
    quantizations: Sequence[str] = ()
    layouts: Collection[str] = ()
    priority: int = 0
    row_invariant: bool = False
    sampler: Sampler = REFERENCE

    @override
    def why_not(self, config: DecoderConfig) -> str | None:
        """It computes every model."""
        return None

    @override
    def describe(self) -> str:
        return ""

    @override
    def load(
        self,
        config: DecoderConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> Decoder:
        """Tensors are copied to aligned memory, so the file may change afterwards."""
        assert quantization is None, "the reference kernels do not quantise"
        with torch.device("meta"):
            model = Decoder(config)
        fill(model, weights, dtype, device)
        model.tie_head()
        return model.eval()


def open_backend() -> ReferenceBackend:
    """Return the backend; it is always available."""
    return ReferenceBackend()
