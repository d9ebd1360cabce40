"""Positions: rotary angles, sinusoids, and buckets of distances. None of them depends on the batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from speculant.models.description import Attention, DecoderConfig, DistanceBias, Rope
from speculant.models.functions import cosines_and_sines, log_of, logarithm, powers


class Rotary:
    """Angles for positions: cos and sin tables of one model.

    dims: how many dimensions are rotated, the first ones of each head.
    """

    def __init__(self, config: Rope, dims: int) -> None:
        self._config = config
        self._exponents = _exponents(dims)
        self._frequencies = _divided(plain_frequencies(config.theta, dims), config.factors)
        self._long = _divided(plain_frequencies(config.theta, dims), config.long_factors)

    @property
    def pairs(self) -> int:
        """The number of rotated pairs of dimensions."""
        return len(self._exponents)

    def angles(self, positions: Tensor, dtype: torch.dtype, long: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, dims] for positions [T], computed in float32, cast to dtype.

        long [T]: whether a row belongs to a text that is longer than the original context; None = no row does.
        """
        of_pairs = cosines_and_sines(positions[:, None].float() * self._frequencies_of(positions, long))
        cosines, sines = (torch.cat((table, table), dim=-1)[:, None, :] for table in of_pairs)
        return (cosines * self._config.scale).to(dtype), (sines * self._config.scale).to(dtype)

    def query_factors(self, positions: Tensor) -> Tensor | None:
        """Return the factors [T] of queries at positions [T], in float32; None = all are 1."""
        if not self._config.query_beta:
            return None
        whole = torch.floor(positions / self._config.original_max_positions)
        return 1 + self._config.query_beta * logarithm(1 + whole).float()

    def _frequencies_of(self, positions: Tensor, long: Tensor | None) -> Tensor:
        """Return the frequencies [T or 1, dims / 2] of rows."""
        if self._config.kind == "dynamic":
            return self._dynamic(positions)
        frequencies = self._frequencies.to(positions.device)
        if long is None or not self._config.long_factors:
            return frequencies
        return torch.where(long[:, None], self._long.to(positions.device), frequencies)

    def _dynamic(self, positions: Tensor) -> Tensor:
        """NTK scaling: the base grows with the distance of each position beyond the trained length.

        Some implementations use the longest position of the whole pass instead. A token's key then
        depends on how its prompt was chunked. With one token per pass both give the same angles.
        """
        trained, factor = self._config.original_max_positions, self._config.factor
        length = (positions + 1).clamp(min=trained).float()
        dim = 2 * len(self._exponents)
        growth = (factor * length / trained) - (factor - 1)
        base = self._config.theta * powers(growth, torch.full_like(growth, dim / (dim - 2))).float()
        return 1.0 / powers(base[:, None], self._exponents.to(positions.device)).float()


def rotation_of(of: Attention) -> Rope | None:
    """Return the rotary positions of a layer with the number of dimensions: all that its angles depend on."""
    return of.rope and replace(of.rope, dims=of.rotated)


def rotations(config: DecoderConfig) -> tuple[Rope, ...]:
    """Return the distinct rotary positions of a decoder's layers, each with its dimensions, in order of first use."""
    found = dict.fromkeys(rotation_of(layer.attention) for layer in config.layers if layer.attention)
    return tuple(rotation for rotation in found if rotation)


def plain_frequencies(theta: float, dims: int) -> Tensor:
    """Return the frequencies [pairs] of rotary positions that are not scaled, in float32.

    An odd number of dims is rounded up to pairs, without changing the frequencies of the others.
    """
    return 1.0 / powers(theta, _exponents(dims)).float()


def _exponents(dims: int) -> Tensor:
    return torch.arange(0, dims, 2, dtype=torch.int64, device="cpu").float() / dims


def _divided(frequencies: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Divide in float64, so that factors can stand for any frequencies in float32."""
    if not factors:
        return frequencies
    return (frequencies.double() / torch.tensor(factors, dtype=torch.float64, device="cpu")).float()


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return the vectors float32 [n, width] of positions [n]: the sines of all frequencies, then the cosines."""
    places = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    cosines, sines = cosines_and_sines(positions[:, None] / powers(10_000, places / width))
    return torch.cat((sines, cosines[:, : width // 2]), dim=1)


def buckets_of(of: DistanceBias, distances: Tensor) -> Tensor:
    """Return the bucket int64 of each distance int64 from a row back to a key; a key after the row has a negative one.

    The logarithm is in float32, as in transformers: at the edge of a bucket its last bit decides.
    """
    count, first = of.buckets, torch.zeros_like(distances)
    if of.both_ways:
        count //= 2
        first, distances = (distances < 0) * count, distances.abs()
    distances, single = distances.clamp(min=0), count // 2
    logs, most = logarithm(distances.clamp(min=1).float() / single).float(), log_of(of.max_distance / single)
    wide = logs / most * (count - single)
    return first + torch.where(distances < single, distances, (single + wide.long()).clamp(max=count - 1))
