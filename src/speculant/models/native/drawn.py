"""The input and output memory of a native call that draws chains and trees: their input rows, and drawn tokens."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain as chained

import torch
from torch import Tensor

from speculant.cache.paged import KVCache
from speculant.kernels.base import NO_TOKEN, Edits
from speculant.kernels.memory import Scratch
from speculant.kernels.native import Draft, Pass, address, settings_array
from speculant.kernels.native_sampler import NativeEdits
from speculant.models.base import NO_TABLE, Chain, ModelNeeds, known
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedNoise, MostLikely, Stream
from speculant.sampling.distribution import Node, edits_of, sampling_settings
from speculant.tree import parents_of

FORESEEABLE = (Stream, KeyedNoise, MostLikely)


def _edits(chain: Chain) -> Edits | None:
    """Return the edits of a chain's rows; None if its first row has none, because then no row has any."""
    node = Node(chain.request)
    return edits_of(node) if node.edited else None


def is_foreseeable(chain: Chain) -> bool:
    """Whether a chain's noise is known in advance. A constraint's mask is not: it depends on every token drawn."""
    return isinstance(chain.chance, FORESEEABLE) and chain.request.constraint is None


_Kind = tuple[int, int, SamplingParams, tuple[int, ...], int]


def _kind_of(chains: Sequence[Chain]) -> list[_Kind]:
    """Return for each chain its limit, its noise, the settings of its distributions and its shape."""
    kind = list[_Kind]()
    for chain in chains:
        assert isinstance(chain.chance, FORESEEABLE)
        params = chain.request.params
        used = params.softened if chain.softened else params
        kind.append((chain.limit, chain.chance.noise, used, chain.widths, chain.topk))
    return kind


class ChainRows:
    """The input rows of chains, concatenated, with slots that it reserves. See `known` for unknown tokens.

    count: their number. most_drawn: the most rows of a later pass. end: length of the longest sequence in the cache.
    end_position: one more than the last position of a token. groups: of the model's layers. positions [count]: theirs.
    lengths [count]: those of their texts, see `SequenceInput.length`.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int, cache: KVCache, groups: int) -> None:
        tokens, positions, segments, end = list[int](), list[int](), list[int](), 0
        slots = [list[int]() for _ in range(cache.num_groups)]
        self._tables: list[array[int]] = []
        self.positions, self.lengths, self.end_position = positions, list[int](), 0
        self._angles: Tensor | None = None
        for chain in chains:
            seq_id, own, num_positions = chain.request.seq_id, chain.input_tokens, chain.num_positions
            _, start, reserved, others = cache.reserve(seq_id, num_positions)
            table, count = cache.table(seq_id), len(own)
            segments += (len(tokens), count, start, count, -1, address(table), stride(table, cache.num_groups), 0)
            source = NO_TABLE if chain.source is None else cache.table(chain.source)
            segments += (address(source), 0 if chain.source is None else cache.length(chain.source))
            self._tables += (table, source)
            tokens += own
            positions += range(start, start + count)
            for known_slots, added in zip(slots, (reserved, *others), strict=True):
                known_slots += added[:count]
            self.lengths += [chain.request.num_positions] * count
            end = max(end, start + num_positions)
            self.end_position = max(self.end_position, start + count + chain.inner_depth)
        self.most_drawn = sum(chain.num_inner if chain.is_tree else 1 for chain in chains)
        self.count, self.end, self._num_segments, self._groups = len(tokens), end, len(chains), groups
        slots *= groups // len(slots)
        self._memory = array("q", [*known(tokens, vocab_size), *positions, *chained.from_iterable(slots), *segments])

    def long_rows(self, needs: ModelNeeds) -> Tensor | None:
        """See `Batch.long_rows`."""
        return None if needs.restart_at is None else torch.tensor([needs.is_long(each) for each in self.lengths])

    def point(self, on: Pass, angles: Tensor | None) -> None:
        """Let a pass point to the rows. angles: see `AngleTables.rows`."""
        self._angles = angles
        on.angles = None if angles is None else angles.data_ptr()
        size = 8 * self.count
        on.tokens = first = address(self._memory)
        on.positions, on.slots, on.segments = first + size, first + 2 * size, first + (2 + self._groups) * size
        on.num_segments = self._num_segments


class Drawn:
    """Memory for the tokens and probs that chains draw, largest first; `call` points to it.

    It serves other chains of the same kind as well, one draft after the other.
    """

    def __init__(self, chains: Sequence[Chain], vocab_size: int) -> None:
        count, nodes = len(chains), chains[0].limit
        self._kind, self._nodes, self._width = _kind_of(chains), nodes, vocab_size
        self._edited = any(chain.request.params.edits for chain in chains)
        self._tokens = array("q", bytes(8 * count * nodes))
        limits, noise, params, shapes, topk = zip(*self._kind, strict=True)
        widths = [array("q", shape) for shape in shapes]
        shaped, dynamic = array("Q", [address(own) if own else 0 for own in widths]), array("q", topk)
        self._parents, self._scores = (array(code, bytes(8 * count * nodes) if any(topk) else b"") for code in "qd")
        self._numbers = array("Q", [*limits, *noise, *bytes(3 * count)])  # the last ones are set by `prepare`
        settings, edits = settings_array([*map(sampling_settings, params)]), NativeEdits([*map(_edits, chains)])
        self._owners = (settings, edits, widths, shaped, dynamic)
        first, size = address(self._numbers), 8 * count
        self.call = Draft(
            sequences=count,
            nodes=nodes,
            width=vocab_size,
            limits=first,
            widths=address(shaped) if any(shapes) else None,
            topk=address(dynamic) if any(topk) else None,
            parents=address(self._parents),
            scores=address(self._scores),
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
        """Write the drawn tokens to the chains, without the nodes that were not drawn."""
        for row, chain in enumerate(chains):
            first, end = row * self._nodes, row * self._nodes + chain.limit
            tokens = self._tokens[first:end].tolist()
            chain.parents = parents_of(chain.widths) if chain.widths else None
            if chain.topk:
                chain.parents, chain.scores = self._parents[first:end], self._scores[first:end]
            if NO_TOKEN in tokens:
                kept = [node for node, token in enumerate(tokens) if token != NO_TOKEN]
                tokens = [tokens[node] for node in kept]
                chain.probs = None if chain.probs is None else chain.probs[kept]
                if chain.parents is not None:
                    places = {node: place for place, node in enumerate((-1, *kept), -1)}
                    chain.parents = [places[chain.parents[node]] for node in kept]
                chain.scores = None if chain.scores is None else [chain.scores[node] for node in kept]
            chain.tokens = tokens


def stride(table: array[int], num_groups: int) -> int:
    """Return the entries from one group's part of a block table to the next; 0 = all groups of layers have the same."""
    return 0 if num_groups == 1 else len(table) // num_groups
