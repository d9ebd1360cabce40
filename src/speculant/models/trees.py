"""Trees of tokens that a model draws level by level. Each pass feeds a tree so far anew: its rows are nearly free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.kernels.native import Kernels
from speculant.models.base import CausalLM, Feed, build_batch, known
from speculant.models.chains import fit_vocabulary
from speculant.sampling.chance import Chance, KeyedNoise
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree, Request

Pick = Callable[[Tensor], int]  # weights [V] -> a token
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

    def children(self, node: Any, law: Tensor, pick: Pick, distinct: bool) -> list[Child]:
        """Draw a node's children from its law [V]; `distinct` = `pick` gives the same token for the same law."""
        ...


@dataclass(frozen=True)
class Shape:
    """A fixed shape: `paths` are the nodes' ranks among their siblings, from the root down, parents among them.

    Siblings are drawn without replacement.
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

    def is_whole(self) -> bool:
        """Whether every node's parent and elder siblings are there."""
        paths = self.paths | {()}
        return all(
            path[:-1] in paths and all((*path[:-1], rank) in paths for rank in range(path[-1])) for path in self.paths
        )

    def children(self, node: tuple[int, ...], law: Tensor, pick: Pick, distinct: bool) -> list[Child]:
        """See `Branching.children`."""
        count = 0
        while (*node, count) in self.paths:
            count += 1
        return [(token, (*node, rank), own) for rank, (token, own) in enumerate(draw_distinct(law, count, pick))]


@dataclass(frozen=True)
class Draws:
    """`count` chains of `depth` tokens, drawn independently and merged where they agree [003 2.1, SpecInfer].

    A node is known by how many chains have reached it, and its depth. Whether a second chain says something new is a
    coin; what it then says is a draw without replacement.
    """

    count: int
    depth: int

    @property
    def root(self) -> tuple[int, int]:
        """See `Branching.root`."""
        return self.count, 0

    @property
    def most_nodes(self) -> int:
        """See `Branching.most_nodes`."""
        return self.count * self.depth

    def children(self, node: tuple[int, int], law: Tensor, pick: Pick, distinct: bool) -> list[Child]:
        """See `Branching.children`."""
        chains, depth = node
        if depth == self.depth or not float(law.sum()) > 0:
            return []
        if distinct:
            return [(token, (1, depth + 1), own) for token, own in draw_distinct(law, chains, pick)]
        said = [pick(law) for _ in range(chains)]
        children, rest = list[Child](), law
        for token in dict.fromkeys(said):
            children.append((token, (said.count(token), depth + 1), rest / rest.sum()))
            rest = without(rest, token)
        return children


def draw_distinct(law: Tensor, count: int, pick: Pick) -> list[tuple[int, Tensor]]:
    """Draw up to `count` tokens from a law [V] without replacement; each with the law it was drawn from."""
    drawn: list[tuple[int, Tensor]] = []
    while len(drawn) < count and float(law.sum()) > 0:
        law = law / law.sum()
        drawn.append((pick(law), law))
        law = without(law, drawn[-1][0])
    return drawn


def without(law: Tensor, token: int) -> Tensor:
    """Return a law [V] with nothing on one token, not normalised."""
    rest = law.clone()
    rest[token] = 0.0
    return rest


@dataclass(eq=False)
class Tree:
    """One sequence's share: feed what its cache has not seen, then draw up to `limit` nodes (0 = none)."""

    request: Request
    feed: list[int]
    limit: int
    chance: Chance
    nodes: list[Any] = field(default_factory=list)  # what the branching knows each one by
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    newest: int = 0  # the first node of the deepest level

    def draft(self) -> DraftTree:
        """Return the tree so far; laws are told where a ratio rule may ask for them."""
        probs = torch.stack(self.laws) if self.laws and not self.request.coupled else None
        return DraftTree(_ids(self.tokens), _ids(self.parents), probs)

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node; empty for the root (-1)."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


def grow_trees(
    model: CausalLM,
    trees: Sequence[Tree],
    branching: Branching,
    cache: KVCache,
    vocab_size: int,
    kernels: Kernels | None = None,
) -> None:
    """Draw every tree's nodes; the cache must have room for all, and holds the committed tokens alone afterwards."""
    grower = _Grower(model, branching, cache, vocab_size, kernels)
    growing = grower.begin(trees)
    while growing:
        growing = grower.extend(growing)
    for tree in trees:
        if tree.tokens:
            cache.truncate_to(tree.request.seq, len(tree.request.tokens))


@dataclass(frozen=True)
class _Grower:
    model: CausalLM
    branching: Branching
    cache: KVCache
    vocab_size: int
    kernels: Kernels | None

    def begin(self, trees: Sequence[Tree]) -> list[Tree]:
        """Feed the committed tokens and draw the roots' children; return the trees that want more."""
        feeds = [Feed(tree.request.seq, known(tree.feed, self.model), DraftTree.empty()) for tree in trees]
        hidden, ends = self._pass(feeds)
        return self._draw([(tree, -1, end) for tree, end in zip(trees, ends, strict=True) if tree.limit], hidden)

    def extend(self, trees: Sequence[Tree]) -> list[Tree]:
        """Feed the trees so far behind their roots, and draw below the newest level."""
        feeds = []
        for tree in trees:
            request = tree.request
            self.cache.truncate_to(request.seq, len(request.tokens) - 1)
            so_far = DraftTree(_ids(known(tree.tokens, self.model)), _ids(tree.parents))
            feeds.append(Feed(request.seq, known(request.tokens[-1:], self.model), so_far))
        hidden, ends = self._pass(feeds)
        rows = []
        for tree, end in zip(trees, ends, strict=True):
            size = len(tree.tokens)
            rows += [(tree, node, end - size + 1 + node) for node in range(tree.newest, size)]
        return self._draw(rows, hidden)

    def _pass(self, feeds: Sequence[Feed]) -> tuple[Tensor, list[int]]:
        """Return hidden states, and each feed's last row."""
        batch = build_batch(feeds, self.cache, self.model.cache_shape.device)
        last = -1
        ends = [last := last + len(feed.tokens) + feed.tree.size for feed in feeds]
        return self.model.forward(batch, self.cache), ends

    def _draw(self, rows: Sequence[tuple[Tree, int, int]], hidden: Tensor) -> list[Tree]:
        """Draw children below nodes, given as (tree, node, row of the pass); return the trees that want more."""
        if not rows:
            return []
        logits = fit_vocabulary(self.model.logits(hidden[[row for _, _, row in rows]]), self.vocab_size)
        nodes = [Node(tree.request, tree.path(node), softened=tree.request.coupled) for tree, node, _ in rows]
        laws = distribution(logits, nodes, self.kernels)
        before = {tree.request.seq: (tree, len(tree.tokens)) for tree, _, _ in rows}
        for (tree, node, _), law in zip(rows, laws, strict=True):
            self._branch(tree, node, law)
        for tree, size in before.values():
            tree.newest = size
        return [tree for tree, size in before.values() if size < len(tree.tokens) < tree.limit]

    def _branch(self, tree: Tree, node: int, law: Tensor) -> None:
        place = tree.nodes[node] if node >= 0 else self.branching.root
        pick = picker(tree, len(tree.path(node)))
        for token, child, own in self.branching.children(place, law, pick, tree.request.coupled):
            if len(tree.tokens) < tree.limit:
                tree.nodes.append(child)
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.laws.append(own)


def picker(tree: Tree, depth: int) -> Pick:
    """Return what draws at a depth: the likeliest for a greedy request, the noise of that position, or a stream."""
    chance = tree.chance
    if tree.request.coupled and tree.request.params.greedy:
        return lambda law: int(law.argmax())
    if isinstance(chance, KeyedNoise):
        return lambda law: chance.moved(depth).draw(law)
    return chance.draw


def _ids(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
