"""Randomness as an interface: every random number comes from a `Chance`.

Every production stream is a counter-based hash of (seed, purpose, round) or of (seed, position), so a
draw does not depend on the batch, on other requests or on how many numbers other streams have drawn.
"""

from __future__ import annotations

from copy import copy
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from speculant.kernels import REFERENCE, Sampler, gumbel
from speculant.types import Request

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Chance(Protocol):
    """The two random operations of drafting and verification."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability; never for 0, always for 1."""
        ...

    def draw(self, weights: Tensor) -> int:
        """Return a token drawn with probability proportional to weights [V] (any positive sum)."""
        ...


class Chances(Protocol):
    """Makes the `Chance` of a request's next step."""

    def draft(self, request: Request) -> Chance:
        """Return the chance with which the request's next draft is drawn."""
        ...

    def verify(self, request: Request) -> Chance:
        """Return the chance with which the request's next draft is verified."""
        ...


class Purpose(IntEnum):
    """The purpose of a stream. Streams of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    DRAW = 3
    NOISE = 4
    REQUEST = 5


class Noise(IntEnum):
    """How a token is drawn from weights; the numbers are those of csrc/speculant.h."""

    INDEPENDENT = 0  # the inverse of the cumulative sum
    SHARED = 1  # Gumbel noise
    NONE = 2  # the largest weight


class Stream(Chance):
    """Independent uniforms, keyed by (seed, purpose, round) and counted from 0."""

    noise = Noise.INDEPENDENT

    def __init__(self, seed: int, purposes: tuple[Purpose, Purpose], round_: int, sampler: Sampler = REFERENCE) -> None:
        self._sampler = sampler
        accept, draw = purposes
        self._accept_key = mix_in(0, mix_in(mix(seed, accept), round_))
        self._draw_key = self._accept_key if draw == accept else mix_in(0, mix_in(mix(seed, draw), round_))
        self._count = 0

    @override
    def accept(self, probability: float) -> bool:
        """Return whether u < probability, strictly, with u in [0, 1)."""
        return self._uniform(self._accept_key) < probability

    @override
    def draw(self, weights: Tensor) -> int:
        """The inverse of the cumulative sum, in float64."""
        return self._sampler.draw(weights, False, mix_in(*self.take_keys(1)))

    def take_keys(self, n: int) -> tuple[int, int]:
        """Skip n draws; return (key, count): skipped draw i has the random bits `mix_in(key, count + i)`."""
        self._count += n
        return self._draw_key, self._count - n + 1

    def _uniform(self, key: int) -> float:
        self._count += 1
        return (mix_in(key, self._count) >> 11) * 2.0**-53


class KeyedNoise(Chance):
    """Gumbel noise keyed by (seed, absolute position, token id): argmax(log w + G) is a draw from w.

    Draft and target use the same noise at the same position and so mostly draw the same token
    (`match`); a draw depends on its own position alone. A ratio rule must not use it.
    """

    noise = Noise.SHARED

    def __init__(self, seed: int, position: int, sampler: Sampler = REFERENCE) -> None:
        self._key, self._position, self._sampler = mix(seed, Purpose.NOISE), position, sampler

    @override
    def accept(self, probability: float) -> bool:
        """See `Chance.accept`; `match` does not need it, and it raises TypeError."""
        raise TypeError("keyed noise is shared with the draft and must not decide a p/q ratio test")

    @override
    def draw(self, weights: Tensor) -> int:
        """Each call advances by one position. Ties go to the lowest id."""
        self._position += 1
        return self._sampler.draw(weights, True, mix_in(self._key, self._position - 1))

    def scores(self, weights: Tensor) -> Tensor:
        """Return each token's share [V] of all w e^G, with weights w and noise G; `draw` takes the largest."""
        tokens = torch.arange(len(weights), device=weights.device)
        return torch.softmax(weights.log() + gumbel(mix_in(self._key, self._position), tokens), 0)

    def moved(self, places: int) -> KeyedNoise:
        """Return the noise that begins `places` positions later; draws from either do not affect the other."""
        moved = copy(self)
        moved._position += places
        return moved

    def take_keys(self, n: int) -> tuple[int, int]:
        """Skip n draws; return (key, count): skipped draw i has the noise of `mix_in(key, count + i)`."""
        self._position += n
        return self._key, self._position - n


class MostLikely(Chance):
    """No randomness: the token with the largest weight, the lowest id among equals."""

    noise = Noise.NONE

    @override
    def accept(self, probability: float) -> bool:
        """It raises TypeError."""
        raise TypeError("the most likely token is no draw and must not decide a p/q ratio test")

    @override
    def draw(self, weights: Tensor) -> int:
        """Without chance."""
        return int(weights.argmax())

    def take_keys(self, n: int) -> tuple[int, int]:
        """Return (key, count), which mean nothing here."""
        return 0, 0


class KeyedChances(Chances):
    """The production source: keyed noise where draft and target share noise, else separate streams."""

    def __init__(self, sampler: Sampler = REFERENCE) -> None:
        self._sampler = sampler

    @override
    def draft(self, request: Request) -> Chance:
        if request.drafts.shared_noise:
            return KeyedNoise(request.seed, len(request.tokens), self._sampler)
        return Stream(request.seed, (Purpose.DRAFT, Purpose.DRAFT), request.rounds, self._sampler)

    @override
    def verify(self, request: Request) -> Chance:
        if request.drafts.shared_noise:
            return KeyedNoise(request.seed, len(request.tokens), self._sampler)
        return Stream(request.seed, (Purpose.ACCEPT, Purpose.DRAW), request.rounds, self._sampler)


def foresee(chance: Stream | KeyedNoise, count: int) -> list[int]:
    """Return the keys of the next `count` draws of a chance (`Sampler.draw`), and skip these draws."""
    key, first = chance.take_keys(count)
    return [mix_in(key, first + draw) for draw in range(count)]


@lru_cache(maxsize=1024)  # every step hashes a request's values again
def mix(*values: int) -> int:
    """Hash integers to 64 bits: one splitmix64 round per value."""
    state = 0
    for value in values:
        state = mix_in(state, value)
    return state


def mix_in(state: int, value: int) -> int:
    """Hash one more integer into a state of 64 bits."""
    x = (state ^ (value & _MASK)) + _GOLDEN & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
