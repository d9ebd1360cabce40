"""Chains whose passes, laws and draws are one native call: what is recorded once and replayed for every draft."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.kernels.native import NO_LAW, Draft, Law
from speculant.models.base import Chain, known
from speculant.sampling.chance import KeyedNoise, Stream
from speculant.sampling.distribution import edits, native_law

FORESEEABLE = (Stream, KeyedNoise)


def can_replay(chain: Chain) -> bool:
    """Whether a chain's draws can be foreseen, and its laws are no matter of single tokens or their history."""
    return isinstance(chain.chance, FORESEEABLE) and not edits(chain.request.params)


class ChainRows:
    """What chains feed, side by side; a pass points to it."""

    def __init__(self) -> None:
        self.tokens, self.positions, self.slots, self.segments = array("q"), array("q"), array("q"), array("q")
        self.end = 0  # of the longest sequence
        self._tables: list[Tensor] = []

    def add(self, chain: Chain, vocab_size: int, cache: KVCache) -> None:
        """Reserve what a chain needs and lay out what it feeds: tokens that the model knows."""
        seq, fed = chain.request.seq, len(chain.feed)
        slots, table = cache.reserve(seq, chain.num_positions), cache.table(seq).blocks
        self.segments.extend((len(self.tokens), fed, slots.start, fed, -1, table.data_ptr()))
        self.tokens.extend(known(chain.feed, vocab_size))
        self.positions.extend(range(slots.start, slots.start + fed))
        self.slots.extend(slots.places[:fed])
        self.end = max(self.end, slots.end)
        self._tables.append(table)


class Drawn:
    """Room for what chains draw, longest first; `asked` points to it."""

    def __init__(self, chains: Sequence[Chain], vocab_size: int) -> None:
        count, steps = len(chains), chains[0].limit
        self._steps = steps
        self._tokens = array("q", bytes(8 * count * steps))
        chances, coupled, limits, told = array("Q"), array("q"), array("q"), array("Q")
        for chain in chains:
            assert isinstance(chain.chance, FORESEEABLE)
            chances.extend(chain.chance.ahead(chain.limit))
            coupled.append(chain.chance.coupled)
            limits.append(chain.limit)
            if not chain.request.coupled:  # nobody else asks for them
                chain.laws = torch.empty(chain.limit, vocab_size, dtype=torch.float64)
            told.append(0 if chain.laws is None else chain.laws.data_ptr())
        laws = (Law * count)(*[native_law(chain.request.params) for chain in chains])
        self._kept = (chances, limits, coupled, laws, told)
        self.asked = Draft(
            sequences=count,
            steps=steps,
            width=vocab_size,
            limits=address(limits),
            laws=ctypes.addressof(laws),
            coupled=address(coupled),
            chances=address(chances),
            drawn=address(self._tokens),
            out=address(told),
        )

    def give(self, chains: Sequence[Chain]) -> None:
        """Tell the chains what they drew."""
        for row, chain in enumerate(chains):
            first = row * self._steps
            tokens = self._tokens[first : first + chain.limit].tolist()
            if NO_LAW in tokens:
                tokens = tokens[: tokens.index(NO_LAW)]
                chain.laws = None if chain.laws is None else chain.laws[: len(tokens)]
            chain.tokens = tokens


def address(items: array[int]) -> int:
    """Return where an array's items are."""
    return items.buffer_info()[0]
