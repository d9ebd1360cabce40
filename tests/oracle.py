"""A model whose slots name their owner, and the texts that requests must have: plain Python, no engine.

A slot holds (token, position, hash of the prefix that ends with it). Every row recomputes the hash of all
that it sees, so a stale, foreign, doubled or misplaced slot is a mismatch. The next token's logits are a
function of the prefix hash alone, so what a request says can be worked out without a cache.

A layer with a window has slots for the last positions only, and those must hold the same prefix.

The slots of a source have negative positions. The prefixes of a text begin with the hash of its source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, KVStorage
from speculant.models import Batch, Chain, Hidden, ModelNeeds, Segment, context_slots, visible_keys
from speculant.sampling import Chance, Node, distribution
from speculant.types import Request
from tests.caches import read, seen_from

V = 8
END = 0
NOTHING = 1  # the hash of no tokens
NO_SOURCE = 2  # the hash of the first tokens of a source, before any
_PRIME = 2**53 - 111  # so that a float64 holds every hash exactly


class Mismatch(BaseException):  # no Exception, so that no engine can take it for a request's own
    """A slot, a draft or a prefix is wrong."""


def require(holds: bool, objection: str) -> None:
    """Raise Mismatch unless something holds: for checks that are called from within an engine."""
    if not holds:
        raise Mismatch(objection)


def extended(prefix: int, token: int) -> int:
    """Return the hash of a prefix and one more token."""
    return (prefix * 6364136223846793005 + token + 1442695040888963407) % _PRIME


def prefix_hashes(tokens: Iterable[int], prefix: int = NOTHING) -> list[int]:
    """Return the hash after each token."""
    hashes = []
    for token in tokens:
        prefix = extended(prefix, token)
        hashes.append(prefix)
    return hashes


def origin(source: Sequence[int]) -> int:
    """Return the hash that the prefixes of a text with this source begin with; () = it has none."""
    return prefix_hashes(source, NO_SOURCE)[-1] if source else NOTHING


def hashes_of(request: Request, tokens: Sequence[int] | None = None) -> list[int]:
    """Return the hash after each token of a request; tokens: others than its own."""
    return prefix_hashes(request.tokens if tokens is None else tokens, origin(request.source))


def scrambled(number: int) -> int:
    """Return 64 bits that look random and depend on a number alone."""
    bits = number * 0x9E3779B97F4A7C15 & (2**64 - 1)
    bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return bits ^ bits >> 32


@functools.lru_cache(maxsize=2**14)
def logits_after(prefix: int, key: int = 0) -> tuple[float, ...]:
    """Return V logits, multiples of 1/2 with many ties; the end token is rather unlikely."""
    bits = scrambled(prefix ^ key)
    logits = [(bits >> 4 * token & 15) / 2 for token in range(V)]
    logits[END] -= 1.5
    return tuple(logits)


def likeliest(prefix: int) -> int:
    """Return the target's greedy choice."""
    logits = logits_after(prefix)
    return logits.index(max(logits))


class OracleModel:
    """A `CausalLM` over slots that say whose they are; its hidden states are the prefix hashes.

    Its distribution is the target's, but for every `astray`-th prefix if that is not 0: a draft model that errs.
    `fed` says, by sequence, how many committed positions it had last, and their hash. windows: of the layers; the first
    one is the longest, at least 2 positions: a row finds the hash of its prefix there. has_source: it is an
    encoder-decoder model.
    """

    vocab_size = V
    hidden_size = 1

    def __init__(
        self,
        max_positions: int,
        astray: int = 0,
        windows: tuple[int | None, ...] = (None,),
        has_source: bool = False,
    ) -> None:
        self.needs = ModelNeeds(source=has_source)
        self.max_positions = max_positions
        self.astray = astray
        self.num_layers, self._windows = len(windows), windows
        self.cache_shape = CacheShape(len(windows), 1, 3, torch.float64, torch.device("cpu"), windows)
        self.fed: dict[int, tuple[int, int]] = {}

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`: [T, 1], in every layer."""
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        require(max(positions) < self.max_positions, "beyond the model's positions")
        require(batch.embeddings is None, "a row that is no token has no hash")
        hashes: list[int] = []
        contexts = [self._contexts(batch, storage, layer) for layer in range(self.num_layers)]
        for segment, *before in zip(batch.segments, *contexts, strict=True):
            rows = slice(len(hashes), len(hashes) + segment.num_rows)
            for prefix in before:
                count = len(prefix.tokens)
                require(before[0].end_with(count) == prefix, f"sequence {segment.seq_id} has other tokens in a layer")
            begin = self._origin(segment, batch.block_size, storage)
            require(not segment.start or before[0].begins(begin), f"sequence {segment.seq_id} has another source")
            hashes += self._hashes(segment, tokens[rows], positions[rows], before[0], begin)
        keys = torch.tensor([tokens, positions, hashes], dtype=torch.float64).T[:, None]
        for layer in range(self.num_layers):
            slots = batch.slots_of(min(layer, batch.num_groups - 1))
            require(len(set(slots.tolist())) == len(tokens), "two rows of a pass share a slot")
            storage.write(layer, slots, keys, -keys)
        last = torch.tensor(hashes, dtype=torch.float64)[:, None]
        return Hidden(last, tuple(last for _ in taps))

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """See `EncodesSources.encode`: [T, 1]."""
        require(self.needs.source, "the model has no encoder")
        tokens, hashes = batch.tokens.tolist(), list[int]()
        for segment in batch.segments:
            require(segment.start == 0 and not segment.parents, "not a whole source")
            hashes += prefix_hashes(tokens[len(hashes) : len(hashes) + segment.num_rows], NO_SOURCE)
        require(len(set(batch.slot_mapping.tolist())) == len(tokens), "two rows of a pass share a slot")
        keys = torch.tensor([tokens, (-1 - batch.positions).tolist(), hashes], dtype=torch.float64).T[:, None]
        storage.write(0, batch.slot_mapping, keys, -keys)
        return torch.tensor(hashes, dtype=torch.float64)[:, None]

    def _origin(self, segment: Segment, size: int, storage: KVStorage) -> int:
        """Return the hash that a sequence's prefixes begin with, from its source in the storage."""
        length, table = segment.source_length, segment.source_table
        require(bool(length) == self.needs.source, f"sequence {segment.seq_id} lacks its source")
        if not length:
            return NOTHING
        slots = torch.tensor([table[place // size] * size + place % size for place in range(length)])
        keys, values = (part[:, 0].T for part in storage.read(0, slots))
        require(bool((keys == -values).all()), "keys and values of a source were parted")
        tokens, positions, hashes = keys.tolist()
        require(positions == [-1 - place for place in range(length)], "not a whole source in order")
        require(hashes == prefix_hashes(map(int, tokens), NO_SOURCE), "slots of several sources")
        return int(hashes[-1])

    def _contexts(self, batch: Batch, storage: KVStorage, layer: int) -> list[Prefix]:
        """Return what a layer holds of each segment's context, as far as rows see it."""
        window = self._windows[layer]
        slots = context_slots(batch, min(layer, batch.num_groups - 1), window)
        return [
            stored_prefix(*storage.read(layer, own), each.seq_id, each.start, seen_from(window, each.start))
            for each, own in zip(batch.segments, slots, strict=True)
        ]

    def _hashes(
        self, segment: Segment, tokens: list[int], positions: list[int], before: Prefix, begin: int
    ) -> list[int]:
        hashes = _row_hashes(segment, tokens, positions, int(before.hashes[-1]) if segment.start else begin)
        self.fed[segment.seq_id] = segment.start + segment.num_committed, hashes[segment.num_committed - 1]
        return hashes

    def logits(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.logits`."""
        return torch.tensor([self._logits(int(prefix)) for prefix in hidden[:, 0].tolist()], dtype=torch.float64)

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        """See `CausalLM.grow`: one pass per token."""
        return chains

    def _logits(self, prefix: int) -> tuple[float, ...]:
        return logits_after(prefix, key=int(bool(self.astray) and prefix % self.astray == 0))


def _row_hashes(segment: Segment, tokens: list[int], positions: list[int], before: int) -> list[int]:
    """Return the hash after each row of a sequence, which goes on from the last slot that the row sees but itself."""
    start = segment.start
    if not segment.parents:
        require(positions == list(range(start, start + len(tokens))), "rows that are no prefix in order")
        return prefix_hashes(tokens, before)
    seen = visible_keys(segment, torch.tensor(positions), None).numpy()
    require(bool(seen[:, :start].all()), "a row does not see the whole context")
    hashes: list[int] = []
    for row, token in enumerate(tokens):
        path = seen[row, start:].nonzero()[0].tolist()
        require(path.pop() == row, "a row does not see itself last")
        in_order = [positions[place] for place in [*path, row]] == list(range(start, positions[row] + 1))
        require(in_order, "a row sees what is no prefix in order")
        chained = [hashes[place] for place in path] == prefix_hashes([tokens[place] for place in path], before)
        require(chained, "a row sees nodes that are not its ancestors")
        hashes.append(extended(hashes[path[-1]] if path else before, token))
    return hashes


class Prefix(NamedTuple):
    """What the positions of a sequence hold, in order: whole numbers, though the storage makes floats of them."""

    tokens: list[float]
    positions: list[float]
    hashes: list[float]

    def end_with(self, count: int) -> Prefix:
        """Return the last `count` positions."""
        return Prefix(*(part[len(part) - count :] for part in self))

    def begins(self, begin: int) -> bool:
        """Whether its hashes begin with a hash, as far as the first position is held."""
        return self.positions[0] > 0 or self.hashes[0] == extended(begin, int(self.tokens[0]))


def stored_prefix(keys: Tensor, values: Tensor, seq_id: int, end: int, first: int = 0) -> Prefix:
    """Return the content of a sequence's positions first .. end - 1: one prefix, in order."""
    if first == end:
        return Prefix([], [], [])
    keys, values = (part[: end - first, 0].T.numpy() for part in (keys, values))
    held = Prefix(*keys.tolist())
    require(bool((keys == -values).all()), "keys and values were parted")
    require(held.positions == list(range(first, end)), f"sequence {seq_id} holds the positions {held.positions}")
    known = held.hashes[:1]  # what came before it is not held, or is a source
    hashes = [*known, *prefix_hashes(map(int, held.tokens[1:]), int(known[0]))]
    require(held.hashes == hashes, f"sequence {seq_id} holds slots of several prefixes")
    return held


def assert_holds(cache: KVCache, seq_id: int, tokens: Sequence[int], source: Sequence[int] = ()) -> None:
    """Assert that a sequence holds exactly the slots of these tokens, in each layer as far as a next row sees them.

    source: the text was computed after it.
    """
    length = cache.length(seq_id)
    assert length == len(tokens)
    for layer, pool in enumerate(cache.pools):
        first = seen_from(pool.window, length)
        held = stored_prefix(*read(cache, layer, seq_id, first), seq_id, length, first)
        assert held.tokens == list(tokens[first:]), f"sequence {seq_id} holds {held.tokens} and not {tokens[first:]}"
        assert not held.tokens or held.begins(origin(source)), f"sequence {seq_id} was computed after another source"


class PlainChance:
    """A `Chance` in plain Python: `key` and how often it was asked decide everything."""

    def __init__(self, key: int) -> None:
        self._key = key

    def accept(self, probability: float) -> bool:
        """See `Chance.accept`."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """See `Chance.draw`: the inverse of the cumulative sum."""
        values = weights.tolist()
        point, last = self._uniform() * sum(values), 0
        for token, weight in enumerate(values):
            if weight > 0:
                last, point = token, point - weight
                if point < 0:
                    break
        return last

    def _uniform(self) -> float:
        self._key += 1
        return scrambled(self._key) / 2**64


class PlainChances:
    """A `Chances` keyed like the production one.

    By position where draft and target are on shared noise; else by purpose and round.
    """

    def draft(self, request: Request) -> Chance:
        """See `Chances.draft`."""
        return self._chance(request, 1)

    def verify(self, request: Request) -> Chance:
        """See `Chances.verify`."""
        return self._chance(request, 2)

    def _chance(self, request: Request, purpose: int) -> PlainChance:
        if request.shared_noise:
            return PlainChance(scrambled(request.seed) + len(request.tokens))
        return PlainChance(scrambled(request.seed + purpose) + 1000 * request.rounds)


def assert_own_tokens(request: Request) -> None:
    """Assert that each token is the one that plain decoding chooses after those before it.

    By induction that is the whole text that the request would get alone, without speculation. Where a
    ratio rule decides, chance chooses otherwise than plain decoding, and only the distribution's support is known.
    """
    prefixes = hashes_of(request)[len(request.prompt) - 1 : -1]
    if request.params.greedy and not request.params.penalised:
        assert request.output == [likeliest(prefix) for prefix in prefixes], f"not the text of {request.prompt} alone"
    elif prefixes:
        _assert_own_draws(replace(request, tokens=list(request.prompt)), request.output, prefixes)


def _assert_own_draws(fresh: Request, output: Sequence[int], prefixes: Sequence[int]) -> None:
    logits = torch.tensor([logits_after(prefix) for prefix in prefixes], dtype=torch.float64)
    distributions = distribution(logits, [Node(fresh, output[:place]) for place in range(len(output))])
    assert all(float(distribution[token]) > 0 for distribution, token in zip(distributions, output, strict=True)), (
        "an impossible token"
    )
    if fresh.shared_noise:
        chance = PlainChances().verify(fresh)
        assert output == [chance.draw(distribution) for distribution in distributions], (
            f"not the text of {fresh.prompt} alone"
        )


def assert_prompt_logprobs(request: Request) -> None:
    """Assert that each prompt token has the log-probability that the model gives it, if that was asked for."""
    if request.params.prompt_logprobs is None or request.index:
        return
    noted = [entry[token].logprob for entry, token in zip(request.prompt_logprobs, request.prompt[1:], strict=True)]
    distributions = [logits_after(prefix) for prefix in hashes_of(request, request.prompt[:-1])]
    expected = [
        distribution[token] - math.log(sum(map(math.exp, distribution)))
        for distribution, token in zip(distributions, request.prompt[1:], strict=True)
    ]
    assert np.allclose(noted, expected, rtol=0, atol=1e-9), f"prompt log-probabilities {noted}, not {expected}"
