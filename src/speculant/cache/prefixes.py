"""The prefix index: full committed blocks by the tokens that they hold, so that other sequences can start from them.

The tokens are a tree: a node is one full block's tokens, and its children are those that followed it. A lookup compares
the tokens, not only a hash of them, and descends from the blocks before it. Each salt has a root of its own, so tenants
share no blocks.

    node        tokens 0 - 3 ---- tokens 4 - 7 ---- tokens 8 - 11      one tree for all groups of layers
    no window   b7                b2                b5
    window      .                 b4                b6                 . = evicted: a prefix can begin without it

Groups of layers index their blocks in one tree. A node stays as long as it has a block, a child or a sequence that
lists it. In a group without a window a block serves nobody without all blocks before it: when it is evicted, its node
goes, and all nodes below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class PrefixNode:
    """The tokens of one full block. The root of a salt has no parent and no tokens.

    blocks: the group's block that holds these tokens, by index. users: how many sequences list the node, by group.
    """

    cache_salt: str
    parent: PrefixNode | None = None
    tokens: tuple[int, ...] = ()
    blocks: dict[PrefixIndex, int] = field(default_factory=dict)
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    users: int = 0


class PrefixTree:
    """The known prefixes, in steps of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[str, PrefixNode] = {}

    def root(self, cache_salt: str) -> PrefixNode:
        """Return the root of a salt's prefixes."""
        return self._roots.setdefault(cache_salt, PrefixNode(cache_salt))

    def match(self, tokens: Sequence[int], cache_salt: str) -> list[PrefixNode]:
        """Return the nodes of the longest known prefix of `tokens`, in order."""
        found: list[PrefixNode] = []
        node = self._roots.get(cache_salt)
        while node is not None:
            node = node.children.get(self._tokens_of(tokens, len(found)))
            if node is not None:
                found.append(node)
        return found

    def child(self, parent: PrefixNode, tokens: Sequence[int], index: int) -> PrefixNode:
        """Return the node of the `index`-th block of `tokens` below `parent`; make it if it is unknown."""
        own = self._tokens_of(tokens, index)
        node = parent.children.get(own)
        if node is None:
            node = parent.children[own] = PrefixNode(parent.cache_salt, parent, own)
        return node

    def prune(self, node: PrefixNode) -> None:
        """Drop a node that serves nobody, and those above it that served it alone.

        Clients choose the salts, and unused roots would pile up.
        """
        parent = node.parent
        while parent is not None and not (node.blocks or node.children or node.users):
            del parent.children[node.tokens]
            node, parent = parent, parent.parent
        if parent is None and not node.children:
            self._roots.pop(node.cache_salt, None)

    def cut(self, node: PrefixNode) -> list[PrefixNode]:
        """Drop a node and its descendants; return them."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self.prune(node.parent)
        return list(_subtree(node))

    def check(self, listed: Iterable[PrefixNode]) -> None:
        """Assert that every node serves somebody; `listed` are those that sequences list, as often as they do."""
        users = Counter(listed)
        for node in self.nodes():
            assert node.users == users.pop(node, 0), "a node counts other sequences than those that list it"
            assert node.blocks or node.children or node.users, "a node that serves nobody"
            assert len(node.tokens) == self.block_size, "a block that is not full"
        assert not users, "a sequence lists a node that is not in the tree"

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield every node but the roots."""
        for root in self._roots.values():
            for top in root.children.values():
                yield from _subtree(top)

    def _tokens_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.block_size : (index + 1) * self.block_size])


class PrefixIndex:
    """The blocks of one group of layers in a tree. nodes: by block.

    window: the positions that a row of the group's layers sees, None = all. With a window a block serves without those
    before it. on_removed: called for a block that leaves because the whole prefix does.
    """

    def __init__(self, tree: PrefixTree, window: int | None = None) -> None:
        self.tree, self.window = tree, window
        self.nodes: dict[int, PrefixNode] = {}
        self.on_removed: Callable[[int], None] = lambda block: None

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

    def block(self, node: PrefixNode) -> int | None:
        """Return the group's block of a node, if it has one."""
        return node.blocks.get(self)

    def insert(self, node: PrefixNode, block: int) -> int:
        """Return the group's block of a node, which is `block` if it had none."""
        known = node.blocks.setdefault(self, block)
        if known == block:
            self.nodes[block] = node
        return known

    def remove(self, block: int) -> list[int]:
        """Remove a block, and all blocks that serve nobody without it; return those of this group."""
        node = self.nodes[block]
        if self.window is not None:
            del self.nodes[block], node.blocks[self]
            self.tree.prune(node)
            return [block]
        gone = self.tree.cut(node)
        for each in gone:
            for index, own in each.blocks.items():
                del index.nodes[own]
                if index is not self:
                    index.on_removed(own)
        return [each.blocks[self] for each in gone]

    def check(self) -> None:
        """Assert that the tree and the table by block agree."""
        reached = {node.blocks[self]: node for node in self.tree.nodes() if self in node.blocks}
        assert reached == self.nodes, "a block in the index can't be reached, or is reached twice"
        assert self.window is not None or len(reached) == len([*self.tree.nodes()]), "a prefix with a gap"


def _subtree(top: PrefixNode) -> Iterator[PrefixNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
