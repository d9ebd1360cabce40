"""Topologies of draft trees: static, dynamic, or parallel chains that share common prefixes; the option `tree`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext, require_no_stop
from speculant.errors import ConfigError
from speculant.kernels import REFERENCE, Sampler

DYNAMIC = "dynamic"
USUAL_TOPK, USUAL_DEPTH, USUAL_NODES = 3, 6, 8  # of dynamic trees
MOST_TOPK = 32  # and the most levels
Pick = Callable[[Tensor], int]  # weights [V] -> a token
Distributions = Sequence[Tensor | None]  # by source, the next token's distribution [V]; None = a source with a backlog
Child = tuple[int, Any, Tensor]  # a token, its node's state, and the distribution [V] that it was drawn from


class TreeTopology(Protocol):
    """How a tree branches. It must not depend on the tokens that are drawn: that would bias ratio rules."""

    @property
    def root(self) -> Any:
        """The topology's state of the root."""
        ...

    @property
    def most_nodes(self) -> int:
        """The most nodes that a tree can have."""
        ...

    @property
    def depth(self) -> int:
        """The most levels that a tree can have below the root."""
        ...

    def within(self, size: int) -> TreeTopology:
        """Return the topology for a tree of at most `size` nodes: the best ones, chosen before any draw."""
        ...

    def children(
        self, node: Any, probs: Distributions, pick: Pick, distinct: bool, sampler: Sampler = REFERENCE
    ) -> list[Child]:
        """Draw a node's children; `distinct` = `pick` gives the same token for the same distribution."""
        ...


@dataclass(frozen=True)
class StaticTree(TreeTopology):
    """A fixed shape. A path lists the ranks among siblings from the root to a node; `paths` has one for every node.

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
    @override
    def root(self) -> tuple[int, ...]:
        return ()

    @property
    @override
    def most_nodes(self) -> int:
        return len(self.paths)

    @property
    @override
    def depth(self) -> int:
        return max(map(len, self.paths))

    @override
    def within(self, size: int) -> StaticTree:
        """Nodes near the root and of low rank come first."""
        return self if size >= len(self.paths) else _best_nodes(self.paths, size)

    def is_whole(self) -> bool:
        """Whether every node's parent and elder siblings are in the tree."""
        paths = self.paths | {()}
        return all(
            path[:-1] in paths and all((*path[:-1], rank) in paths for rank in range(path[-1])) for path in self.paths
        )

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The children of the root and of each node, in order of depth; see `Chain.widths`."""
        counts = Counter(path[:-1] for path in self.paths)
        return tuple(counts[path] for path in ((), *sorted(self.paths, key=lambda path: (len(path), path))))

    @override
    def children(
        self, node: tuple[int, ...], probs: Distributions, pick: Pick, distinct: bool, sampler: Sampler = REFERENCE
    ) -> list[Child]:
        children, (token_probs, *_) = list[Child](), probs
        while (
            (place := (*node, len(children))) in self.paths and token_probs is not None and float(token_probs.sum()) > 0
        ):
            children.append((pick(token_probs), place, token_probs))
            token_probs = sampler.normalise(without(token_probs, children[-1][0]))
        return children


@dataclass(frozen=True)
class DynamicTree:
    """The most confident nodes (arXiv 2406.16858): the shape depends on the tokens, see drafting/growth.py.

    topk: at each depth, this many of the most confident nodes get this many children each; the root gets as many.
    depth: the most levels below the root.
    """

    topk: int = USUAL_TOPK
    depth: int = USUAL_DEPTH

    @property
    def most_nodes(self) -> int:
        """The most nodes that are drawn; a draft keeps the most confident of them."""
        return self.topk + (self.depth - 1) * self.topk**2


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

    `chains` has the source of each. A node's state is the sources of the chains that reached it, and its depth. A chain
    draws an earlier sibling's token or a new one; a new one's distribution is the chain's without those tokens.
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
        self,
        node: tuple[tuple[int, ...], int],
        probs: Distributions,
        pick: Pick,
        distinct: bool,
        sampler: Sampler = REFERENCE,
    ) -> list[Child]:
        """See `TreeTopology.children`; where draws can't differ, a source's next chain takes its next best token."""
        chains, depth = node
        drawn, own = dict[int, list[int]](), dict[int, Tensor]()
        for source in chains if depth < self.depth else ():
            token_probs = probs[source]
            if token_probs is not None and distinct:
                token_probs = without(token_probs, *(token for token, sources in drawn.items() if source in sources))
            if token_probs is None or not float(token_probs.sum()) > 0:
                continue
            token = pick(token_probs)
            if token not in drawn:
                rest = without(token_probs, *drawn)
                drawn[token], own[token] = [], sampler.normalise(rest)
            drawn[token].append(source)
        return [(token, (tuple(sources), depth + 1), own[token]) for token, sources in drawn.items()]


def without(token_probs: Tensor, *tokens: int) -> Tensor:
    """Return a distribution [V] with some tokens' probabilities set to 0, not normalised."""
    rest = token_probs.clone()
    rest[list(tokens)] = 0.0
    return rest


def tree_option(context: DrafterContext, given: object) -> StaticTree | None:
    """Read the option `tree` of a drafter of chains or trees; None = chains. Raises ConfigError."""
    topology = read_tree(given)
    if topology is not None:
        require_no_stop(context)
    return topology


def growing_tree_option(context: DrafterContext, given: object) -> StaticTree | DynamicTree | None:
    """Read the option `tree` of a drafter that may draw dynamic trees too; None = chains. Raises ConfigError."""
    if given == DYNAMIC or isinstance(given, Mapping):
        require_no_stop(context)
        return _read_dynamic({} if given == DYNAMIC else given)
    return tree_option(context, given)


def _read_dynamic(given: object) -> DynamicTree:
    known = {field.name for field in fields(DynamicTree)}
    if not isinstance(given, Mapping) or not all(
        key in known and isinstance(count, int) and not isinstance(count, bool) and 0 < count <= MOST_TOPK
        for key, count in given.items()
    ):
        raise ConfigError(
            f"tree={given!r} describes no dynamic tree",
            f'use "{DYNAMIC}", or numbers up to {MOST_TOPK} as {{"topk": 3, "depth": 6}}.',
        )
    return DynamicTree(**given)


def read_tree(given: Any) -> StaticTree | None:
    """Read a tree's shape; None stays None. Raises ConfigError."""
    if given is None:
        return None
    error = ConfigError(
        f"tree={given!r} is not the shape of a tree",
        "give children per node at each depth, as [3, 2, 1], or every node's ranks, parents among them: [[0], [0, 0]].",
    )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise error
    if all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in given):
        return StaticTree.of_widths(given)
    if not all(isinstance(path, list | tuple) and path and all(_is_rank(rank) for rank in path) for path in given):
        raise error
    shape = StaticTree(frozenset(tuple(path) for path in given))
    if not shape.is_whole():
        raise error
    return shape


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
