"""Token Recycling (arXiv 2408.08696): when a token recurs, the target's likely next tokens of last time are proposed.

A matrix has each token's `successors` most likely next tokens, taken from the last verified row with the token as its
input, which may be the row of a rejected draft. A draft is a static tree: a child of rank r of any node is the
successor of rank r of its token. A tree of n nodes has the n paths with the lowest sums of (1 + 2 rank), as if survival
fell by one factor for each level and by its square for each rank. Its nodes come likeliest first, by the acceptance of
earlier nodes of their depths and ranks. A prompt has logits for its last row alone, so after a token without successors
the draft repeats the token that last followed it in the request's own text, or else in its source.

The matrix outlives requests: most of the gain comes from earlier requests. It depends on their texts, so there is one
for each cache_salt, of at most `matrices`; the least recently used is dropped.

Memory: 4 * V * successors bytes for each matrix (39 MB for 8 of V = 151,936), and 100 bytes for each token of a running
request. Cost: 12 microseconds to propose 8 nodes, 12 to observe a pass over them, and `top_tokens` over the verified
rows (engine/runner.py): 55 microseconds for 9 rows at V = 8192, 215 at V = 151,936.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from speculant.drafting.base import DrafterContext, DrafterNeeds, DrafterReads, Method, StatelessDrafter, read_options
from speculant.errors import ConfigError, DraftError
from speculant.tree import depths_of
from speculant.types import CommittedRows, DraftTree, Request

METHOD = Method(default_length=8, learns=True, varies=True)
PART = 2**14  # rows that a later engine learns at a time
MOST_COST = 9  # of a path, the sum of (1 + 2 rank) along it; there are 88 such paths
PRIOR, PRIOR_WEIGHT, MEMORY = 0.4, 8, 256  # an acceptance rate's first value, its weight, and the averaging window


@dataclass(frozen=True)
class RecyclingOptions:
    """successors: how many are kept for each token. matrices: for how many cache salts."""

    successors: int = 8
    matrices: int = 8

    def __post_init__(self) -> None:
        for name, most in (("successors", 64), ("matrices", 1024)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)} is not from 1 to {most}", "8 is usual.")


@dataclass
class Recycled:
    """The state of one sequence, with its last draft.

    followers: the token that last followed each of the first `seen` tokens.
    """

    followers: dict[int, int] = field(default_factory=dict)
    seen: int = 0
    draft: DraftTree = field(default_factory=DraftTree.empty)
    ranks: Sequence[int] = ()

    def read(self, tokens: Sequence[int], source: Sequence[int]) -> None:
        """Read the tokens of a text after the first `seen` ones; before a text's first tokens, read its source."""
        if not self.seen:
            self.followers.update(pairwise(source))
        first = max(0, self.seen - 1)
        self.followers.update(zip(tokens[first:], tokens[first + 1 :], strict=False))
        self.seen = len(tokens)


class NodeAcceptance:
    """How often nodes of each depth and rank were accepted once their parent was: running averages."""

    def __init__(self) -> None:
        self._rates: dict[tuple[int, int], tuple[float, int]] = {}

    def rate(self, depth: int, rank: int) -> float:
        """Return the estimate, from 0 to 1."""
        return self._rates.get((depth, rank), (PRIOR ** (1 + 2 * rank), PRIOR_WEIGHT))[0]

    def learn(self, draft: DraftTree, ranks: Sequence[int], gained: Sequence[int]) -> None:
        """Compare the children of each accepted node with the token that followed."""
        node: int | None = -1
        for depth, token in enumerate(gained, 1):
            assert node is not None
            for child in draft.children(node):
                self._count(depth, ranks[child], draft.token_list[child] == token)
            node = draft.child(node, token)
            if node is None:
                break

    def _count(self, depth: int, rank: int, accepted: bool) -> None:
        rate, count = self._rates.get((depth, rank), (self.rate(depth, rank), PRIOR_WEIGHT))
        count = min(count + 1, MEMORY)
        self._rates[depth, rank] = rate + (accepted - rate) / count, count


class TokenRecycling(StatelessDrafter):
    """A matrix of successors per cache salt, and the state of each running sequence."""

    def __init__(self, options: RecyclingOptions, vocab_size: int) -> None:
        self.needs = DrafterNeeds(
            max_nodes=len(_paths(options.successors)), emits_tree=True, reads=DrafterReads(top_k=options.successors)
        )
        self._options, self._vocab_size = options, vocab_size
        self.keeps = f"{options.successors} successors"
        self._matrices: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._changed = set[str]()  # the salts of matrices that have changed since `learned` was called
        self._sequences: dict[int, Recycled] = {}
        self._acceptance = NodeAcceptance()

    @override
    def begin(self, request: Request) -> None:
        self._sequences[request.seq_id] = Recycled()

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        sequence = self._sequences[request.seq_id]
        self._acceptance.learn(sequence.draft, sequence.ranks, rows.gained)
        sequence.draft = DraftTree.empty()
        if rows.successors:
            tokens, best = zip(*rows.successors, strict=True)
            self._matrix(request.sender.cache_salt)[list(tokens), : len(best[0])] = best
            self._changed.add(request.sender.cache_salt)

    @override
    def end(self, request: Request) -> None:
        self._sequences.pop(request.seq_id, None)

    @override
    def learned(self) -> Iterator[tuple[str, Sequence[array[int]]]]:
        """Yield the rows that are known, each after its token."""
        while self._changed:
            salt = self._changed.pop()
            matrix = self._matrices[salt]
            known = np.flatnonzero(matrix[:, 0] >= 0).astype(np.int32)
            rows = np.column_stack((known, matrix[known]))
            yield salt, [array("i", rows[at : at + PART].tobytes()) for at in range(0, len(rows), PART)]

    @override
    def learn(self, salt: str, part: array[int]) -> None:
        """Learn the rows of tokens that have none yet."""
        width, numbers = 1 + self._options.successors, np.asarray(part, np.int32)
        rows = numbers[: len(numbers) // width * width].reshape(-1, width)
        ordered = np.sort(rows[:, 1:], axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if rows.size != numbers.size or twice.any() or (rows[:, 0] < 0).any() or (rows >= self._vocab_size).any():
            raise DraftError("rows of successors are not of this form", f"keep {width} numbers for each token.")
        matrix = self._matrix(salt)
        fresh = rows[matrix[rows[:, 0], 0] < 0]
        matrix[fresh[:, 0]] = fresh[:, 1:]

    def _matrix(self, cache_salt: str) -> NDArray[np.int32]:
        """Return the matrix [V, successors] of a salt, best first; -1 = unknown."""
        if cache_salt not in self._matrices:
            self._matrices[cache_salt] = np.full((self._vocab_size, self._options.successors), -1, dtype=np.int32)
            if len(self._matrices) > self._options.matrices:
                self._changed.discard(self._matrices.popitem(last=False)[0])
        self._matrices.move_to_end(cache_salt)
        return self._matrices[cache_salt]

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        if limit == 0:
            return DraftTree.empty()
        sequence, matrix = self._sequences[request.seq_id], self._matrix(request.sender.cache_salt)
        sequence.read(request.tokens, request.source)

        def successors(token: int) -> list[int]:
            known: list[int] = matrix[token].tolist()
            return known if known[0] >= 0 else [sequence.followers.get(token, -1)]

        shape = tree_shape(min(limit, self.needs.max_nodes or limit), self._options.successors)
        tokens, parents, ranks = grow(shape, request.tokens[-1], successors)
        scores = [self._acceptance.rate(*place) for place in zip(depths_of(parents), ranks, strict=True)]
        order, parents = likeliest_first(scores, parents)
        tokens, scores = [tokens[node] for node in order], [scores[node] for node in order]
        sequence.ranks = [ranks[node] for node in order]
        sequence.draft = DraftTree.of(tokens, parents, scores=scores)
        return sequence.draft


def grow(
    shape: Sequence[tuple[int, int]], root: int, successors: Callable[[int], Sequence[int]]
) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, parents and ranks of a tree of a shape below a token; nodes without a token are left out.

    successors: a token's likely next tokens, best first, distinct; -1 or a shorter list = no more are known.
    """
    tokens, parents, ranks = list[int](), list[int](), list[int]()
    made: list[int | None] = []  # by place in the shape
    below = {-1: successors(root)}
    for above, rank in shape:
        parent = -1 if above < 0 else made[above]
        token = -1
        if parent is not None:
            if parent not in below:
                below[parent] = successors(tokens[parent])
            token = below[parent][rank] if rank < len(below[parent]) else -1
        made.append(len(tokens) if token >= 0 else None)
        if parent is not None and token >= 0:
            tokens.append(token)
            parents.append(parent)
            ranks.append(rank)
    return tokens, parents, ranks


def likeliest_first(scores: Sequence[float], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the nodes of a tree in the order of their survival, and the parents that they have in this order.

    Survival is the product of the scores down to a node, so that parents stay before children.
    """
    survivals = list[float]()
    for score, parent in zip(scores, parents, strict=True):
        survivals.append(score * survivals[parent] if parent >= 0 else score)
    order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
    places = {node: place for place, node in enumerate(order)}
    return order, [places.get(parents[node], -1) for node in order]


@lru_cache(maxsize=256)
def tree_shape(size: int, successors: int) -> Sequence[tuple[int, int]]:
    """Return each node of the tree of `size` nodes, the likeliest first, as its parent's place (-1 = root) and rank."""
    paths = _paths(successors)[:size]
    places = {path: place for place, path in enumerate(paths)}
    return tuple((places.get(path[:-1], -1), path[-1]) for path in paths)


@lru_cache(maxsize=64)
def _paths(successors: int) -> Sequence[tuple[int, ...]]:
    """Return all paths of a cost of up to MOST_COST, with ranks below `successors`, the cheapest first."""
    paths, level = list[tuple[int, ...]](), [tuple[int, ...]()]
    while level:
        level = [(*path, rank) for path in level for rank in range(successors) if _cost((*path, rank)) <= MOST_COST]
        paths += level
    return sorted(paths, key=lambda path: (_cost(path), path))


def _cost(path: Sequence[int]) -> int:
    return sum(1 + 2 * rank for rank in path)


def build(context: DrafterContext) -> TokenRecycling:
    """Make the drafter; it needs no model."""
    return TokenRecycling(read_options(context, RecyclingOptions), context.target.vocab_size)
