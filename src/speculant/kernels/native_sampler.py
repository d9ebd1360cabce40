"""The sampler of the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.base import Edits, RowDraw, SamplingSettings
from speculant.kernels.native import Kernels
from speculant.kernels.native_edits import NativeEdits
from speculant.kernels.reference_sampler import REFERENCE, own_scores


@dataclass(frozen=True)
class NativeSampler:
    """See `Sampler`. The kernels take logits in float32 and weights in float64; the reference takes other types."""

    kernels: Kernels

    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        """See `Sampler.distribution`."""
        if logits.dtype == torch.float64:
            return REFERENCE.distribution(logits, settings, edits)
        if not any(edits):
            return self.kernels.probs(logits.float(), settings, 0)
        native = NativeEdits(edits)
        return self.kernels.probs(own_scores(logits, edits), settings, native.address)

    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        """See `Sampler.draw`."""
        if weights.dtype != torch.float64:
            return REFERENCE.draw(weights, shared_noise, key)
        return self.kernels.draw(weights, shared_noise, key)

    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        """See `Sampler.draw_rows`."""
        if weights.dtype != torch.float64:
            return REFERENCE.draw_rows(weights, draws)
        return self.kernels.draw_rows(weights, draws)

    def normalise(self, weights: Tensor) -> Tensor:
        """See `Sampler.normalise`."""
        return REFERENCE.normalise(weights) if weights.dtype != torch.float64 else self.kernels.normalise(weights)
