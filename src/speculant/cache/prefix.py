"""The prefix index: full blocks by the tokens that they hold, so that other sequences can start from them.

The index is a tree. A node is one full block, and its children are the blocks that followed it. A lookup compares a
block's tokens, not only a hash of them, and descends from the blocks before it. Each salt has a root of its own, so
tenants share no blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class PrefixNode:
    """One full block in the index. The root has no parent, no tokens and no block."""

    cache_salt: str
    parent: PrefixNode | None = None
    tokens: tuple[int, ...] = ()
    block: int | None = None
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)


class PrefixIndex:
    """Finds blocks by the tokens that they and all blocks before them hold. nodes: by block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str, PrefixNode] = {}
        self.nodes: dict[int, PrefixNode] = {}

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

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

    def insert(self, parent: PrefixNode, tokens: Sequence[int], index: int, block: int) -> PrefixNode:
        """Return the node of the `index`-th block of `tokens` below `parent`; a new node holds `block`."""
        own = self._tokens_of(tokens, index)
        known = parent.children.get(own)
        if known is not None:
            return known
        node = parent.children[own] = self.nodes[block] = PrefixNode(parent.cache_salt, parent, own, block)
        return node

    def remove(self, block: int) -> list[int]:
        """Remove a block's node and its descendants; return their blocks."""
        node = self.nodes[block]
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self._drop_root_if_empty(node.parent)
        removed = []
        for gone in list(_subtree(node)):
            assert gone.block is not None
            removed.append(gone.block)
            del self.nodes[gone.block]
        return removed

    def _drop_root_if_empty(self, node: PrefixNode) -> None:
        """Drop a root without children: clients choose the salts, and unused roots would pile up."""
        if node.parent is None and not node.children:
            del self._roots[node.cache_salt]

    def _tokens_of(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def check(self) -> None:
        """Assert that the tree and the table by block agree."""
        reached = {node.block: node for root in self._roots.values() for top in root.children.values()
                   for node in _subtree(top)}  # fmt: skip
        assert reached == self.nodes, "a block in the index can't be reached, or is reached twice"
        assert all(len(node.tokens) == self._block_size for node in reached.values()), "a block that is not full"


def _subtree(top: PrefixNode) -> Iterator[PrefixNode]:
    stack = [top]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        yield node
