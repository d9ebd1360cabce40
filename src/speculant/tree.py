"""Draft trees: the tokens that a drafter proposes. A chain is a tree without branches."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Proposed tokens in prefix order; the root is the last committed token and not part of it.

    A chain is a tree whose node i has parent i - 1. A tree made of integers gets its tensors on first use.

    scores: for each node, the drafter's estimate of the probability that it is accepted once its parent is, from 0 to
    1; None = no estimate. Only the draft length depends on them.

    The target's pass has a row for each node. A subclass may add rows that are no proposals, see `LookAheadTree`.
    """

    tokens: Tensor  # [n] int64
    parents: Tensor  # [n] int64; parents come before children; -1 = child of the root
    probs: Tensor | None = None  # [n, V]: the distribution each node was drawn from; None = deterministic
    scores: Sequence[float] | None = None

    @classmethod
    def chain(cls, tokens: list[int], probs: Tensor | None = None, scores: Sequence[float] | None = None) -> DraftTree:
        """Make a tree without branches from integers of any type. Raises TypeError for others."""
        tree, values = cls.__new__(cls), array("q", tokens).tolist()  # integers of Python, of any integer type
        size = len(values)
        vars(tree).update(
            token_list=values, size=size, num_rows=size, parent_list=list(range(-1, size - 1)), probs=probs,
            scores=scores, is_chain=True, depths=list(range(1, size + 1)),  # known here, and read in every pass
        )  # fmt: skip
        return tree

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        probs: Tensor | None = None,
        scores: Sequence[float] | None = None,
    ) -> DraftTree:
        """Make a tree from integers of any type. Raises TypeError for others."""
        tree, values = cls.__new__(cls), array("q", tokens).tolist()
        vars(tree).update(
            token_list=values, size=len(values), num_rows=len(values), parent_list=array("q", parents).tolist(),
            probs=probs, scores=scores,
        )  # fmt: skip
        return tree

    def __getattr__(self, name: str) -> Tensor:
        """Make a tensor of a tree that was made from integers, when it is first read."""
        if name not in ("tokens", "parents"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        made = ids(self.token_list if name == "tokens" else self.parent_list)
        vars(self)[name] = made
        return made

    @staticmethod
    @cache
    def empty() -> DraftTree:
        """Return the tree without nodes, which means plain decoding."""
        return DraftTree.chain([])

    @cached_property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.token_list)

    @cached_property
    def token_list(self) -> list[int]:
        """The tokens as Python integers."""
        return [int(token) for token in self.tokens.tolist()]

    @cached_property
    def parent_list(self) -> list[int]:
        """The parents as Python integers."""
        return [int(parent) for parent in self.parents.tolist()]

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parent_list == list(range(-1, self.size - 1))

    @cached_property
    def depths(self) -> list[int]:
        """Each node's distance from the root, 1 for its children."""
        return list(range(1, self.size + 1)) if self.is_chain else depths_of(self.parent_list)

    @cached_property
    def num_rows(self) -> int:
        """The rows of the target's pass: the nodes, and the rows that a subclass adds after them."""
        return self.size

    def pass_rows(self) -> tuple[DraftTree, Sequence[Tensor]]:
        """Return the tree of all rows of the pass, and the input embeddings [hidden] of those that are no nodes."""
        return self, ()

    def observed(self, kept: Sequence[int]) -> Sequence[int]:
        """Return the rows whose states are observed if the `kept` nodes are committed: these, and rows below them."""
        return kept

    def check_rows(self, most: int) -> None:
        """Raise DraftError for more than `most` rows below a node that are no nodes."""

    def first(self, count: int) -> DraftTree:
        """Return the tree of the first `count` nodes; this tree itself if it has no more nodes."""
        if count >= self.size:
            return self
        probs = None if self.probs is None else self.probs[:count]
        scores = None if self.scores is None else self.scores[:count]
        return DraftTree.of(self.token_list[:count], self.parent_list[:count], probs, scores)

    def first_path(self, most: int) -> DraftTree:
        """Return the chain of the first child of the root, its first child and so on, of at most `most` nodes."""
        if self.is_chain:
            return self.first(most)
        path, node = list[int](), -1
        while len(path) < most and self.has_children(node):
            node = self.parent_list.index(node)
            path.append(node)
        return self.only(path)

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """Return the tree of some nodes, in the order given; the parent of each comes before it among them."""
        places = {node: place for place, node in enumerate((-1, *nodes), -1)}
        tokens = [self.token_list[node] for node in nodes]
        parents = [places[self.parent_list[node]] for node in nodes]
        probs = None if self.probs is None else self.probs[list(nodes)]
        scores = None if self.scores is None else [self.scores[node] for node in nodes]
        return DraftTree.of(tokens, parents, probs, scores)

    def children(self, node: int) -> list[int]:
        """Return the children of a node in drawing order; -1 = the root."""
        if self.is_chain:
            return [node + 1] if node + 1 < self.size else []
        return [child for child, parent in enumerate(self.parent_list) if parent == node]

    def child_tokens(self, node: int) -> list[int]:
        """Return the tokens of a node's children in drawing order; -1 = the root."""
        if self.is_chain:
            return self.token_list[node + 1 : node + 2]
        return [self.token_list[child] for child in self.children(node)]

    def has_children(self, node: int) -> bool:
        """Whether a node has children; -1 = the root."""
        return node + 1 < self.size if self.is_chain else node in self.parent_list

    def tokens_to(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to `node`; empty for the root (-1)."""
        return self.token_list[: node + 1] if self.is_chain else tokens_to(node, self.token_list, self.parent_list)

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of a node (-1 = the root) with a token, if there is one."""
        return self.nodes_by_edge.get((node, token))

    @cached_property
    def nodes_by_edge(self) -> dict[tuple[int, int], int]:
        """The first child of each node (-1 = the root) with each token, by node and token."""
        edges = list(zip(self.parent_list, self.token_list, strict=True))
        return dict(zip(reversed(edges), reversed(range(self.size)), strict=True))

    def path_along(self, tokens: Iterable[int]) -> list[int]:
        """Return the nodes that match `tokens` from the root on, up to the first token without a node."""
        path: list[int] = []
        for token in tokens:
            found = self.child(path[-1] if path else -1, token)
            if found is None:
                break
            path.append(found)
        return path


def ids(values: Sequence[int]) -> Tensor:
    """Return integers as a tensor [n] int64; much faster than torch.tensor."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return each node's distance from the root, 1 for its children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@lru_cache(maxsize=1024)
def parents_of(widths: tuple[int, ...]) -> tuple[int, ...]:
    """Return the parents of nodes in order of depth, for the number of children of the root and of each node."""
    return tuple(node - 1 for node, width in enumerate(widths) for _ in range(width))


def ancestors_of(parents: Sequence[int]) -> Tensor:
    """Return [n, n] bool: entry (i, j) is True if node j is node i or one of its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def tokens_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens of a tree from the root's child down to `node`; empty for the root (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
