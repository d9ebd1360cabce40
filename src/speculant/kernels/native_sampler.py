"""Distributions and draws by the native kernels: the reference's, bit for bit where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.base import SamplingSettings
from speculant.kernels.native import Kernels
from speculant.kernels.reference_sampler import REFERENCE


@dataclass(frozen=True)
class NativeSampler:
    """See `Sampler`. The kernels take logits in float32 and weights in float64; the reference takes what is neither."""

    kernels: Kernels

    def distribution(self, logits: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
        """See `Sampler.distribution`."""
        if logits.dtype != torch.float32:
            return REFERENCE.distribution(logits, settings)
        return self.kernels.probs(logits, settings)

    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        """See `Sampler.draw`."""
        if weights.dtype != torch.float64:
            return REFERENCE.draw(weights, shared_noise, key)
        return self.kernels.draw(weights, shared_noise, key)
