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

FORESEEABLE = (Stream, KeyedNoise, MostLikely)


def _edits(chain: Chain) -> Edits | None:
    """Return the edits of a chain's rows; None if its first row has none, and so no other either."""
    node = Node(chain.request)
    return edits_of(node) if node.edited else None


def _settings(chain: Chain) -> SamplingSettings:
    return sampling_settings(chain.request.params.softened if chain.softened else chain.request.params)


def can_replay(chain: Chain) -> bool:
    """Whether a chain's noise is known in advance. A constraint's mask is not: it depends on every token drawn."""
    return isinstance(chain.chance, FORESEEABLE) and chain.request.constraint is None


class ChainRows:
    """The input rows of chains, concatenated; a pass points to them."""

    def __init__(self) -> None:
        self.tokens, self.positions, self.slots, self.segments = array("q"), array("q"), array("q"), array("q")
        self.end = 0  # length of the longest sequence
        self._tables: list[array[int]] = []

    def add(self, chain: Chain, vocab_size: int, cache: KVCache) -> None:
        """Reserve the slots of a chain and append its input rows; see `known` for tokens outside the vocabulary."""
        seq_id, count = chain.request.seq_id, len(chain.input_tokens)
        slots, table = cache.reserve(seq_id, chain.num_positions), cache.table(seq_id)
        self.segments.extend((len(self.tokens), count, slots.start, count, -1, address(table)))
        self.tokens.extend(known(chain.input_tokens, vocab_size))
        self.positions.extend(range(slots.start, slots.start + count))
        self.slots.extend(slots.slots[:count])
        self.end = max(self.end, slots.end)
        self._tables.append(table)


class Drawn:
    """Memory for the tokens and probs that chains draw, longest first; `call` points to it."""

    def __init__(self, chains: Sequence[Chain], vocab_size: int, scratch: Scratch) -> None:
        count, steps = len(chains), chains[0].limit
        self._steps = steps
        self._tokens = array("q", bytes(8 * count * steps))
        chances, noise, limits, out = array("Q"), array("q"), array("q"), array("Q")
        emitting = [chain for chain in chains if chain.emits_probs]
        if emitting:
            lengths = [chain.limit for chain in emitting]
            probs = torch.split(scratch.empty(sum(lengths), vocab_size, dtype=torch.float64), lengths)
            for chain, own in zip(emitting, probs, strict=True):
                chain.probs = own
        for chain in chains:
            assert isinstance(chain.chance, FORESEEABLE)
            chances.extend(chain.chance.take_keys(chain.limit))
            noise.append(chain.chance.noise)
            limits.append(chain.limit)
            out.append(0 if chain.probs is None else chain.probs.data_ptr())
        settings = settings_array([_settings(chain) for chain in chains])
        edits = NativeEdits([_edits(chain) for chain in chains])
        self._owners = (chances, limits, noise, settings, edits, out)
        self.call = Draft(
            sequences=count,
            steps=steps,
            width=vocab_size,
            limits=address(limits),
            settings=ctypes.addressof(settings),
            edits=edits.address,
            noise=address(noise),
            chances=address(chances),
            drawn=address(self._tokens),
            out=address(out),
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
