"""The parts of an engine under schedules: a model that breaks on demand, drafters and a cache that are watched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from speculant.cache import KVCache, KVStorage, Slots
from speculant.drafting import DrafterNeeds, ModelDrafter, StatelessDrafter
from speculant.models import Batch, Hidden
from speculant.scheduling import PREPARED
from speculant.types import DraftTree, Request
from tests.oracle import OracleModel, V, extended, hashes_of, likeliest, prefix_hashes, require, scrambled


class InjectedError(Exception):
    """What a broken pass raises."""


@dataclass
class Fault:
    """A number of passes that raise, over `victim` or over anything, before they write (early) or after it."""

    error: Callable[[], BaseException]
    times: int
    early: bool
    victim: int | tuple[int, ...] | None  # a sequence, or a source's tokens


Raised = tuple[BaseException, list[Any]]  # and the sequences of the pass that raised it, or the tokens of its sources


class FragileModel(OracleModel):
    """An oracle model that fails on demand, and notes the failing sequences in `raised`."""

    def __init__(
        self,
        max_positions: int,
        raised: list[Raised],
        astray: int = 0,
        windows: tuple[int | None, ...] = (None,),
        has_source: bool = False,
    ) -> None:
        super().__init__(max_positions, astray, windows, has_source)
        self.fault: Fault | None = None
        self.num_passes = self.num_struck = 0
        self._raised = raised

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        self.num_passes += 1
        requests = [segment.seq_id for segment in batch.segments]
        self._strike(requests, early=True)
        hidden = super().forward(batch, storage, taps)
        self._strike(requests, early=False)
        return hidden

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """See `EncodesSources.encode`."""
        left, sources = batch.tokens.tolist(), list[tuple[int, ...]]()
        for segment in batch.segments:
            sources.append(tuple(left[: segment.num_rows]))
            del left[: segment.num_rows]
        self._strike(sources, early=True)
        states = super().encode(batch, storage)
        self._strike(sources, early=False)
        return states

    def _strike(self, requests: list[Any], *, early: bool) -> None:
        fault = self.fault
        if fault is None or fault.early != early:
            return
        if fault.victim is None or fault.victim in requests:
            fault.times -= 1
            self.num_struck += 1
            self.fault = fault if fault.times else None
            self._raised.append((fault.error(), requests))
            raise self._raised[-1][0]


class CountedCache(KVCache):
    """A cache that counts what happens in it, and knows which prefixes may be adopted: committed ones.

    `live` has the requests by sequence.
    """

    def watch(self, live: Mapping[int, Request], tally: Counter[str]) -> Self:
        """Begin to count."""
        self._live, self._tally = live, tally
        self._committed: set[tuple[str, tuple[int, ...]]] = set()  # whole blocks of tokens, by salt
        for pool in self.pools:
            index = pool.index
            index.remove = partial(self._evict, index.remove)  # type: ignore[method-assign]
        return self

    def _evict(self, forget: Callable[[int], list[int]], block: int) -> list[int]:
        self._tally["evictions"] += 1
        return forget(block)

    def reserve(self, seq_id: int, n: int) -> Slots:
        """Reserve; all that it takes beyond new blocks are copies."""
        if n:
            held = self._held.get(seq_id) or self._nothing
            added = -(-(held.length + n) // self.block_size) - len(held.tables[0].blocks)
            self._tally["copies on write"] += held.tables[0].missing(held.length, n) - added
        return super().reserve(seq_id, n)

    def drop_unseen(self, seq_id: int) -> None:
        """Count what is given back."""
        free = sum(pool.num_free for pool in self.pools)
        super().drop_unseen(seq_id)
        self._tally["blocks given back"] += sum(pool.num_free for pool in self.pools) > free

    def compact(self, seq_id: int, base: int, path: Sequence[int]) -> None:
        """Count paths that move."""
        self._tally["compactions"] += list(path) != list(range(len(path)))
        super().compact(seq_id, base, path)

    def fork(self, src: int, dst: int) -> None:
        """Count forks."""
        self._tally["forks"] += self.length(src) > 0
        super().fork(src, dst)

    def match_prefix(self, seq_id: int, tokens: Sequence[int], cache_salt: str = "", limit: int | None = None) -> int:
        """Check that what is adopted was committed."""
        adopted = super().match_prefix(seq_id, tokens, cache_salt, limit)
        self._tally["prefix hits"] += adopted > 0
        salt = cache_salt if seq_id == PREPARED else self._live[seq_id].full_salt
        blocks = (salt, tuple(tokens[: -(-adopted // self.block_size) * self.block_size]))
        require(not adopted or blocks in self._committed, "a prefix that nobody of this salt committed")
        return adopted

    def insert_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Check that what is indexed was committed."""
        super().insert_prefix(seq_id, tokens)
        salt, own = self._held[seq_id].cache_salt if seq_id in self._held else "", tokens
        if seq_id != PREPARED:
            salt, own = self._live[seq_id].full_salt, self._live[seq_id].tokens
        for end in range(self.block_size, min(self.length(seq_id), len(tokens)) + 1, self.block_size):
            require(tokens[:end] == own[:end], "tokens are indexed that were not committed")
            self._committed.add((salt, tuple(tokens[:end])))


class WatchedDrafter(ModelDrafter):
    """The real drafter over an oracle model: each draft must come from the request's tokens and its own."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        trees = super().propose(requests, limits)
        for request, tree, limit in zip(requests, trees, limits, strict=True):
            live = 0 if request.search is None else request.search.beams.live_tree.size
            require(tree.size <= live + limit, "a draft beyond its limit")
            if tree.size and request.search is not None:
                self._assert_fed(request.seq_id, request.tokens)
            elif tree.size:
                self._assert_fed(request.seq_id, [*request.tokens, *tree.token_list[:-1]])
        return trees

    def _assert_fed(self, seq_id: int, tokens: Sequence[int]) -> None:
        model = self._runner.model
        assert isinstance(model, OracleModel)
        held = self.caches[0].length(seq_id)
        require(held == len(tokens), "the draft cache holds more or less than was drafted from")
        require(model.fed[seq_id] == (len(tokens), prefix_hashes(tokens)[-1]), "a draft from another text")


class Guesser(StatelessDrafter):
    """Proposes the greedy text with errors; if it branches, siblings stand before and behind the child that goes on."""

    def __init__(self, branches: bool) -> None:
        self.needs = DrafterNeeds(emits_tree=branches)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._guess(hashes_of(request)[-1], limit) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, prefix: int, limit: int) -> DraftTree:
        tokens, parents, parent = list[int](), list[int](), -1
        while len(tokens) < limit:
            children, chosen = self._children(prefix)
            parents += [parent] * len(children)
            parent, prefix = len(tokens) + chosen, extended(prefix, children[chosen])
            tokens += children
        return DraftTree(torch.tensor(tokens[:limit], dtype=torch.int64), torch.tensor(parents[:limit]))

    def _children(self, prefix: int) -> tuple[list[int], int]:
        """Return different tokens, and the place of the one that goes on."""
        whim = scrambled(prefix)
        token = (likeliest(prefix) + (whim % 5 == 0)) % V
        if not self.needs.emits_tree:
            return [token], 0
        before, behind = whim // 5 % 3, whim // 15 % 2
        return [(token + 3 * place) % V for place in range(-before, behind + 1)], before
