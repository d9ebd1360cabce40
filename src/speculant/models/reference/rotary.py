"""Rotary position embedding and its scalings. An angle depends on the position only, not on the batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speculant.models.description import Rope


class Rotary:
    """Angles for positions: cos and sin tables of one model."""

    def __init__(self, config: Rope, head_dim: int) -> None:
        self._config = config
        self._exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
        self._frequencies = _frequencies(config, self._exponents)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, head_dim] for positions [T], computed in float32, cast to dtype."""
        frequencies = self._frequencies.to(positions.device)
        if self._config.kind == "dynamic":
            angle = positions[:, None].float() * self._dynamic(positions)
        else:
            angle = positions[:, None].float() * frequencies
        angle = torch.cat((angle, angle), dim=-1)[:, None, :]
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return the factors [T] of rotated queries at positions [T]; None = there are none."""
        return None

    def _dynamic(self, positions: Tensor) -> Tensor:
        """NTK scaling: the base grows with the distance of each position beyond the trained length.

        Some implementations use the longest position of the whole pass instead. A token's key then
        depends on how its prompt was chunked. With one token per pass both give the same angles.
        """
        trained, factor = self._config.original_max_positions, self._config.factor
        length = (positions + 1).clamp(min=trained).float()
        dim = 2 * len(self._exponents)
        base = self._config.theta * ((factor * length / trained) - (factor - 1)) ** (dim / (dim - 2))
        return 1.0 / base[:, None] ** self._exponents.to(positions.device)


def _frequencies(config: Rope, exponents: Tensor) -> Tensor:
    plain = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "factors":
        return plain / torch.tensor(config.factors, device=plain.device)
    return plain


def _llama3(config: Rope, plain: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between (Llama 3.1)."""
    turns = config.original_max_positions * plain / (2 * math.pi)  # full turns within the trained length
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / config.factor + blend * plain
