"""How a tree of drafted tokens branches: by a fixed shape, or by chains that part where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from torch import Tensor

Pick = Callable[[Tensor], int]  # weights [V] -> a token
Distributions = Sequence[
    Tensor | None
]  # by source, the distribution [V] of what comes next; None = a source that is behind
Child = tuple[int, Any, Tensor]  # a token, its node's state, and the distribution [V] that it was really drawn from


class TreeTopology(Protocol):
    """How a tree branches. It never looks at the token that was drawn for a node (algorithms, section 2)."""

    @property
    def root(self) -> Any:
        """What the root is to this rule."""
        ...

    @property
    def most_nodes(self) -> int:
        """How large a tree can become."""
        ...

    @property
    def depth(self) -> int:
        """How deep a tree can become."""
        ...

    def within(self, size: int) -> TreeTopology:
        """Return the topology for a tree of at most `size` nodes: the best ones, by what is known before any draw."""
        ...

    def children(self, node: Any, probs: Distributions, pick: Pick, distinct: bool) -> list[Child]:
        """Draw a node's children; `distinct` = `pick` gives the same token for the same distribution."""
        ...


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: `paths` are the nodes' ranks among their siblings, from the root down, parents among them.

    Siblings are drawn without replacement, from the first source.
    """

    paths: frozenset[tuple[int, ...]]

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> StaticTree:
        """Make the tree in which every node at depth d has widths[d] children."""
        paths, level = set[tuple[int, ...]](), [tuple[int, ...]()]
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths.update(level)
        return cls(frozenset(paths))

    @property
    def root(self) -> tuple[int, ...]:
        """See `TreeTopology.root`."""
        return ()

    @property
    def most_nodes(self) -> int:
        """See `TreeTopology.most_nodes`."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """See `TreeTopology.depth`."""
        return max(map(len, self.paths))

    def within(self, size: int) -> StaticTree:
        """See `TreeTopology.within`; nodes near the root and of low rank come first."""
        return self if size >= len(self.paths) else _best_nodes(self.paths, size)

    def is_whole(self) -> bool:
        """Whether every node's parent and elder siblings are there."""
        paths = self.paths | {()}
        return all(
            path[:-1] in paths and all((*path[:-1], rank) in paths for rank in range(path[-1])) for path in self.paths
        )

    def children(self, node: tuple[int, ...], probs: Distributions, pick: Pick, distinct: bool) -> list[Child]:
        """See `TreeTopology.children`."""
        children, (token_probs, *_) = list[Child](), probs
        while (
            (place := (*node, len(children))) in self.paths and token_probs is not None and float(token_probs.sum()) > 0
        ):
            token_probs = token_probs / token_probs.sum()
            children.append((pick(token_probs), place, token_probs))
            token_probs = without(token_probs, children[-1][0])
        return children


@lru_cache(maxsize=1024)
def _best_nodes(paths: frozenset[tuple[int, ...]], size: int) -> StaticTree:
    """Return the `size` nodes with the highest estimated survival, parents and elder siblings of each among them.

    Survival is taken to fall by one factor for each level, and by its square for each rank below the first.
    """
    ordered = sorted(paths, key=lambda path: (sum(1 + 2 * rank for rank in path), path))
    return StaticTree(frozenset(ordered[:size]))


@dataclass(frozen=True)
class ParallelChains:
    """Chains of `depth` tokens, drawn independently and merged where they agree (arXiv 2305.09781).

    `chains` names the source of each. A node is known by the chains that have reached it, and its depth. Whether a
    later chain says something new is a coin; it is then drawn from its distribution without what was drawn before.
    """

    chains: tuple[int, ...]
    depth: int

    @property
    def root(self) -> tuple[tuple[int, ...], int]:
        """See `TreeTopology.root`."""
        return self.chains, 0

    @property
    def most_nodes(self) -> int:
        """See `TreeTopology.most_nodes`."""
        return len(self.chains) * self.depth

    def within(self, size: int) -> ParallelChains:
        """See `TreeTopology.within`; chains grow level by level, so that the first `size` nodes are the best."""
        return self

    def children(
        self, node: tuple[tuple[int, ...], int], probs: Distributions, pick: Pick, distinct: bool
    ) -> list[Child]:
        """See `TreeTopology.children`; where draws can't differ, a source's next chain says its next choice."""
        chains, depth = node
        said, own = dict[int, list[int]](), dict[int, Tensor]()
        for source in chains if depth < self.depth else ():
            token_probs = probs[source]
            if token_probs is not None and distinct:
                token_probs = without(token_probs, *(token for token, sources in said.items() if source in sources))
            if token_probs is None or not float(token_probs.sum()) > 0:
                continue
            token = pick(token_probs)
            if token not in said:
                rest = without(token_probs, *said)
                said[token], own[token] = [], rest / rest.sum()
            said[token].append(source)
        return [(token, (tuple(sources), depth + 1), own[token]) for token, sources in said.items()]


def without(token_probs: Tensor, *tokens: int) -> Tensor:
    """Return a distribution [V] with nothing on some tokens, not normalised."""
    rest = token_probs.clone()
    rest[list(tokens)] = 0.0
    return rest
