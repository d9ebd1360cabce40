"""How a tree of drafted tokens branches: by a fixed shape, or by chains that part where they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Pick = Callable[[Tensor], int]  # weights [V] -> a token
Laws = Sequence[Tensor | None]  # by source, the law [V] of what comes next; None = a source that is behind
Child = tuple[int, Any, Tensor]  # a token, what its node is to the branching, and the law [V] it was really drawn from


class Branching(Protocol):
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

    def children(self, node: Any, laws: Laws, pick: Pick, distinct: bool) -> list[Child]:
        """Draw a node's children; `distinct` = `pick` gives the same token for the same law."""
        ...


@dataclass(frozen=True)
class Shape:
    """A fixed shape: `paths` are the nodes' ranks among their siblings, from the root down, parents among them.

    Siblings are drawn without replacement, from the first source.
    """

    paths: frozenset[tuple[int, ...]]

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> Shape:
        """Make the tree in which every node at depth d has widths[d] children."""
        paths, level = set[tuple[int, ...]](), [tuple[int, ...]()]
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths.update(level)
        return cls(frozenset(paths))

    @property
    def root(self) -> tuple[int, ...]:
        """See `Branching.root`."""
        return ()

    @property
    def most_nodes(self) -> int:
        """See `Branching.most_nodes`."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """See `Branching.depth`."""
        return max(map(len, self.paths))

    def is_whole(self) -> bool:
        """Whether every node's parent and elder siblings are there."""
        paths = self.paths | {()}
        return all(
            path[:-1] in paths and all((*path[:-1], rank) in paths for rank in range(path[-1])) for path in self.paths
        )

    def children(self, node: tuple[int, ...], laws: Laws, pick: Pick, distinct: bool) -> list[Child]:
        """See `Branching.children`."""
        children, (law, *_) = list[Child](), laws
        while (place := (*node, len(children))) in self.paths and law is not None and float(law.sum()) > 0:
            law = law / law.sum()
            children.append((pick(law), place, law))
            law = without(law, children[-1][0])
        return children


@dataclass(frozen=True)
class Draws:
    """Chains of `depth` tokens, drawn independently and merged where they agree [003 2.1, SpecInfer].

    `chains` names the source of each. A node is known by the chains that have reached it, and its depth. Whether a
    later chain says something new is a coin; what it then says is drawn from its law without what was said before.
    """

    chains: tuple[int, ...]
    depth: int

    @property
    def root(self) -> tuple[tuple[int, ...], int]:
        """See `Branching.root`."""
        return self.chains, 0

    @property
    def most_nodes(self) -> int:
        """See `Branching.most_nodes`."""
        return len(self.chains) * self.depth

    def children(self, node: tuple[tuple[int, ...], int], laws: Laws, pick: Pick, distinct: bool) -> list[Child]:
        """See `Branching.children`; where draws can't differ, a source's next chain says its next choice."""
        chains, depth = node
        said, own = dict[int, list[int]](), dict[int, Tensor]()
        for source in chains if depth < self.depth else ():
            law = laws[source]
            if law is not None and distinct:
                law = without(law, *(token for token, sources in said.items() if source in sources))
            if law is None or not float(law.sum()) > 0:
                continue
            token = pick(law)
            if token not in said:
                rest = without(law, *said)
                said[token], own[token] = [], rest / rest.sum()
            said[token].append(source)
        return [(token, (tuple(sources), depth + 1), own[token]) for token, sources in said.items()]


def without(law: Tensor, *tokens: int) -> Tensor:
    """Return a law [V] with nothing on some tokens, not normalised."""
    rest = law.clone()
    rest[list(tokens)] = 0.0
    return rest
