"""Chains whose passes, distributions and draws are one native call per draft."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from speculant.cache.base import KVCache
from speculant.kernels.base import Edits
from speculant.kernels.memory import Scratch
from speculant.kernels.native import NO_TOKEN, Draft, NativeEdits, Pass, address, settings_array
from speculant.models.base import Chain, known
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedNoise, MostLikely, Stream
from speculant.sampling.distribution import Node, edits_of, sampling_settings

FORESEEABLE = (Stream, KeyedNoise, MostLikely)


def _edits(chain: Chain) -> Edits | None:
    """Return the edits of a chain's rows; None if its first row has none, because then no row has any."""
    node = Node(chain.request)
    return edits_of(node) if node.edited else None


def is_foreseeable(chain: Chain) -> bool:
    """Whether a chain's noise is known in advance. A constraint's mask is not: it depends on every token drawn."""
    return isinstance(chain.chance, FORESEEABLE) and chain.request.constraint is None


def _kind_of(chains: Sequence[Chain]) -> list[tuple[int, int, SamplingParams]]:
    """Return for each chain its limit, its noise and the settings of its distributions."""
    kind = list[tuple[int, int, SamplingParams]]()
    for chain in chains:
        assert isinstance(chain.chance, FORESEEABLE)
        params = chain.request.params
        kind.append((chain.limit, chain.chance.noise, params.softened if chain.softened else params))
    return kind


class ChainRows:
    """The input rows of chains, concatenated, with slots that it reserves. See `known` for unknown tokens.

    count: their number. end: length of the longest sequence.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int, cache: KVCache) -> None:
        tokens, positions, slots, segments, end = list[int](), list[int](), list[int](), list[int](), 0
        self._tables: list[array[int]] = []
        for chain in chains:
            seq_id, own, num_positions = chain.request.seq_id, chain.input_tokens, chain.num_positions
            _, start, reserved, _ = cache.reserve(seq_id, num_positions)
            table, count = cache.table(seq_id), len(own)
            segments += (len(tokens), count, start, count, -1, address(table))
            tokens += own
            positions += range(start, start + count)
            slots += reserved[:count]
            end = max(end, start + num_positions)
            self._tables.append(table)
        self.count, self.end, self._num_segments = len(tokens), end, len(chains)
        self._memory = array("q", [*known(tokens, vocab_size), *positions, *slots, *segments])

    def point(self, on: Pass) -> None:
        """Let a pass point to the rows."""
        size = 8 * self.count
        on.tokens = first = address(self._memory)
        on.positions, on.slots, on.segments = first + size, first + 2 * size, first + 3 * size
        on.num_segments = self._num_segments


class Drawn:
    """Memory for the tokens and probs that chains draw, longest first; `call` points to it.

    It serves other chains of the same kind as well, one draft after the other.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int) -> None:
        count, steps = len(chains), chains[0].limit
        self._kind, self._steps, self._width = _kind_of(chains), steps, vocab_size
        self._edited = any(chain.request.params.edits for chain in chains)
        self._tokens = array("q", bytes(8 * count * steps))
        limits, noise, params = zip(*self._kind, strict=True)
        self._numbers = array("Q", [*limits, *noise, *bytes(3 * count)])  # the last ones are set by `prepare`
        settings, edits = settings_array([*map(sampling_settings, params)]), NativeEdits([*map(_edits, chains)])
        self._owners = (settings, edits)
        first, size = address(self._numbers), 8 * count
        self.call = Draft(
            sequences=count,
            steps=steps,
            width=vocab_size,
            limits=first,
            noise=first + size,
            out=first + 2 * size,
            chances=first + 3 * size,
            settings=ctypes.addressof(settings),
            edits=edits.address,
            drawn=address(self._tokens),
        )

    def serves(self, chains: Sequence[Chain], vocab_size: int) -> bool:
        """Whether chains are of its kind. Those with edits never are, because edits change from step to step."""
        return not self._edited and self._width == vocab_size and self._kind == _kind_of(chains)

    def prepare(self, chains: Sequence[Chain], scratch: Scratch) -> None:
        """Take the keys of the chains' draws, and memory for their probs."""
        out, keys = list[int](), list[int]()
        emitting = [chain for chain in chains if chain.emits_probs]
        if emitting:
            lengths = [chain.limit for chain in emitting]
            probs = torch.split(scratch.empty(sum(lengths), self._width, dtype=torch.float64), lengths)
            for chain, own in zip(emitting, probs, strict=True):
                chain.probs = own
        for chain in chains:
            assert isinstance(chain.chance, FORESEEABLE)
            keys += chain.chance.take_keys(chain.limit)
            out.append(0 if chain.probs is None else chain.probs.data_ptr())
        self._numbers[2 * len(chains) :] = array("Q", out + keys)
        self.call.stop_below = chains[0].stop_below

    def write_to(self, chains: Sequence[Chain]) -> None:
        """Write the drawn tokens to the chains, and shorten their probs to match."""
        for row, chain in enumerate(chains):
            first = row * self._steps
            tokens = self._tokens[first : first + chain.limit].tolist()
            if NO_TOKEN in tokens:
                tokens = tokens[: tokens.index(NO_TOKEN)]
                chain.probs = None if chain.probs is None else chain.probs[: len(tokens)]
            chain.tokens = tokens
