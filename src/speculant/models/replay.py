"""Chains whose passes, distributions and draws are one native call, recorded once and replayed for every draft."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from speculant.cache.base import KVCache
from speculant.kernels.base import Edits, SamplingSettings
from speculant.kernels.memory import Scratch
from speculant.kernels.native import NO_TOKEN, Draft, address, settings_array
from speculant.kernels.native_sampler import NativeEdits
from speculant.models.base import Chain, known
from speculant.sampling.chance import KeyedNoise, MostLikely, Stream
from speculant.sampling.distribution import sampling_settings
from speculant.sampling.edits import edits_of
from speculant.sampling.node import Node
from speculant.types import Request

FORESEEABLE = (Stream, KeyedNoise, MostLikely)


def _edits(request: Request) -> Edits | None:
    """Return the edits of a chain's rows; None if its first row has none, and so no other either."""
    node = Node(request)
    return edits_of(node) if node.edited else None


def can_replay(chain: Chain) -> bool:
    """Whether a chain's noise is known in advance. A constraint's mask is not: it depends on every token drawn."""
    return isinstance(chain.chance, FORESEEABLE) and chain.request.constraint is None


class ChainRows:
    """The input rows of chains, concatenated, with slots that it reserves.

    tokens, positions, slots, segments: their addresses, for a pass. end: length of the longest sequence. `known` says
    what becomes of tokens outside the vocabulary.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int, cache: KVCache) -> None:
        tokens, positions, slots, segments = list[int](), list[int](), list[int](), list[int]()
        self.end = 0
        self._tables: list[array[int]] = []
        for chain in chains:
            seq_id, count, num_positions = chain.request.seq_id, len(chain.input_tokens), chain.num_positions
            _, start, own, _ = cache.reserve(seq_id, num_positions)
            table = cache.table(seq_id)
            segments += (len(tokens), count, start, count, -1, address(table))
            tokens += chain.input_tokens
            positions += range(start, start + count)
            slots += own[:count]
            self.end = max(self.end, start + num_positions)
            self._tables.append(table)
        self.count = len(tokens)
        self._memory = array("q", [*known(tokens, vocab_size), *positions, *slots, *segments])
        self.tokens, size = address(self._memory), 8 * self.count
        self.positions, self.slots, self.segments = self.tokens + size, self.tokens + 2 * size, self.tokens + 3 * size


class Drawn:
    """Memory for the tokens and probs that chains draw, longest first; `call` points to it."""

    def __init__(self, chains: Sequence[Chain], vocab_size: int, scratch: Scratch) -> None:
        count, steps = len(chains), chains[0].limit
        self._steps = steps
        self._tokens = array("q", bytes(8 * count * steps))
        emitting = [chain for chain in chains if chain.emits_probs]
        if emitting:
            lengths = [chain.limit for chain in emitting]
            probs = torch.split(scratch.empty(sum(lengths), vocab_size, dtype=torch.float64), lengths)
            for chain, own in zip(emitting, probs, strict=True):
                chain.probs = own
        limits, noise, out, keys = list[int](), list[int](), list[int](), list[int]()
        settings, edits = list[SamplingSettings](), list[Edits | None]()
        for chain in chains:
            chance, params = chain.chance, chain.request.params
            assert isinstance(chance, FORESEEABLE)
            limits.append(chain.limit)
            noise.append(chance.noise)
            out.append(0 if chain.probs is None else chain.probs.data_ptr())
            keys += chance.take_keys(chain.limit)
            settings.append(sampling_settings(params.softened if chain.softened else params))
            edits.append(_edits(chain.request) if params.edits else None)
        numbers = array("Q", [*limits, *noise, *out, *keys])
        first, size = address(numbers), 8 * count
        native_settings, native_edits = settings_array(settings), NativeEdits(edits)
        self._owners = (numbers, native_settings, native_edits)
        self.call = Draft(
            sequences=count,
            steps=steps,
            width=vocab_size,
            limits=first,
            noise=first + size,
            out=first + 2 * size,
            chances=first + 3 * size,
            settings=ctypes.addressof(native_settings),
            edits=native_edits.address,
            drawn=address(self._tokens),
            stop_below=chains[0].stop_below,
        )

    def write_to(self, chains: Sequence[Chain]) -> None:
        """Write the drawn tokens to the chains, and cut their probs to as many."""
        for row, chain in enumerate(chains):
            first = row * self._steps
            tokens = self._tokens[first : first + chain.limit].tolist()
            if NO_TOKEN in tokens:
                tokens = tokens[: tokens.index(NO_TOKEN)]
                chain.probs = None if chain.probs is None else chain.probs[: len(tokens)]
            chain.tokens = tokens
