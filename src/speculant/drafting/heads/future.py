"""A drafter whose heads predict several tokens from one hidden state of the target, without a pass of their own.

A node's distribution depends on its depth alone, except for edits such as penalties. So a tree of drafts is the product
of each head's likeliest tokens, or of tokens drawn from each head.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterNeeds, StatelessDrafter
from speculant.drafting.growth import DepthProbs, draw_trees, likeliest, new_chains
from speculant.drafting.topology import StaticTree
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, FutureHeads
from speculant.sampling import Chances, Node
from speculant.types import CommittedRows, DraftTree, Request

MOST_NODES = 64
MOST_HEADS = 64  # and layers of a head
UNKNOWN = tuple(0.5 ** (1 + 2 * rank) for rank in range(8))  # shares of the ranks of a head that were not measured

OwnHeads = Callable[[Tensor], Tensor]  # states [k, r, hidden] of the first k heads -> logits [k, r, V]
Path = tuple[int, ...]


@dataclass(frozen=True)
class RankedTree(StaticTree):
    """A static tree whose nodes are known from best to worst: the tree of n nodes has the first n of `ranked`."""

    ranked: tuple[Path, ...] = ()

    @override
    def within(self, size: int) -> StaticTree:
        return self if size >= len(self.ranked) else _first_nodes(self.ranked, size)


@lru_cache(maxsize=256)
def _first_nodes(ranked: tuple[Path, ...], size: int) -> StaticTree:
    return StaticTree(frozenset(ranked[:size]))


def product_tree(shares: Sequence[Sequence[float]], size: int = MOST_NODES) -> RankedTree:
    """Return the `size` paths that are accepted most often, if depths are independent (arXiv 2401.10774, 2.3.3).

    shares[d][r]: how often the candidate of rank r at depth d is right; a rank's share counts as at most the share of
    the rank before.
    """
    falling = [list(accumulate(own, min)) for own in shares]
    waiting: list[tuple[float, Path]] = [(-falling[0][0], (0,))]
    ranked = list[Path]()
    while waiting and len(ranked) < size:
        negative, path = heapq.heappop(waiting)
        ranked.append(path)
        own = falling[len(path) - 1]
        if path[-1] + 1 < len(own) and own[path[-1]] > 0:  # the next sibling
            share = negative / own[path[-1]] * own[path[-1] + 1]
            heapq.heappush(waiting, (share, (*path[:-1], path[-1] + 1)))
        if len(path) < len(falling):
            heapq.heappush(waiting, (negative * falling[len(path)][0], (*path, 0)))
    return RankedTree(frozenset(ranked), tuple(ranked))


class FutureDrafter(StatelessDrafter):
    """Drafts trees of a topology, or chains, from the state of the last token that the target has computed.

    own_heads: the heads' own output heads; None = they use the target's. usual_nodes: see `DrafterNeeds`.
    """

    def __init__(
        self,
        heads: FutureHeads,
        target: CausalLM,
        chances: Chances,
        topology: StaticTree,
        sampler: Sampler = REFERENCE,
        own_heads: OwnHeads | None = None,
        usual_nodes: int | None = None,
    ) -> None:
        branches = any(path[-1] for path in topology.paths)
        self.needs = DrafterNeeds(
            max_nodes=topology.most_nodes,
            emits_probs=True,
            emits_tree=branches,
            usual_nodes=min(usual_nodes or topology.most_nodes, topology.most_nodes),
            tree_depth=topology.depth if branches else None,
            hidden_layers=(target.num_layers + 1,),
        )
        self._heads, self._target, self._own_heads = heads, target, own_heads
        self._chances, self._sampler, self._topology = chances, sampler, topology
        self._dtype = target.cache_shape.dtype
        self._states: dict[int, tuple[int, Tensor]] = {}  # by sequence: a position, and states [n, hidden] up to it

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        """Keep the newest state."""
        self._states[request.seq_id] = rows.start + len(rows.tokens) - 1, rows.hidden[0]

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Do nothing: only states of committed tokens are kept."""

    @override
    def end(self, request: Request) -> None:
        self._states.pop(request.seq_id, None)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Draft nothing for a sequence whose newest state is not known."""
        ready = [
            (request, limit)
            for request, limit in zip(requests, limits, strict=True)
            if limit > 0 and self._is_ready(request)
        ]
        made = self._draft(ready) if ready else {}
        return [made.get(request.seq_id, DraftTree.empty()) for request in requests]

    def _is_ready(self, request: Request) -> bool:
        """Whether the state of the last token that the target has computed is known."""
        known = self._states.get(request.seq_id)
        return known is not None and known[0] == len(request.tokens) - 2

    def _draft(self, ready: Sequence[tuple[Request, int]]) -> dict[int, DraftTree]:
        shapes = [self._topology.within(limit) for _, limit in ready]
        logits = self._logits([request for request, _ in ready], max(shape.depth for shape in shapes))
        made, drawn = dict[int, DraftTree](), list[int]()
        for row, ((request, _), shape) in enumerate(zip(ready, shapes, strict=True)):
            if request.drafts.shared_noise and request.params.greedy and not Node(request).edited:
                made[request.seq_id] = likeliest(logits[:, row], shape)
            else:
                drawn.append(row)
        if drawn:
            rows = {ready[row][0].seq_id: row for row in drawn}
            own = [ready[row] for row in drawn]
            probs = DepthProbs(logits.flatten(0, 1), rows, len(ready), self._sampler)
            trees = draw_trees(new_chains(own, self._chances), self._topology, probs)
            made |= {request.seq_id: tree for (request, _), tree in zip(own, trees, strict=True)}
        return made

    def _logits(self, requests: Sequence[Request], depth: int) -> Tensor:
        """Return the logits [depth, r, V] of the heads down to a depth."""
        hidden = torch.stack([self._states[request.seq_id][1][-1] for request in requests])
        states = self._heads.states(hidden.to(self._dtype), depth)
        if self._own_heads is not None:
            logits = self._own_heads(states)
            return logits.float() if logits.dtype == torch.bfloat16 else logits
        return self._target.logits(states.flatten(0, 1)).view(depth, len(requests), -1)


def bounded(topology: StaticTree, depth: int, width: int) -> StaticTree:
    """Return a topology without the nodes below a depth, and without ranks from `width` on."""

    def has(path: Path) -> bool:
        return len(path) <= depth and max(path) < width

    paths = frozenset(filter(has, topology.paths))
    if isinstance(topology, RankedTree):
        return RankedTree(paths, tuple(filter(has, topology.ranked)))
    return StaticTree(paths)
