"""Traversal verification of a tree (arXiv 2505.12398): leaves first; a rejected leaf updates its parent.

w(root) = 1; w(child x of v) = min(1, w(v) p_v(x) / q_v(x)), children as they were drawn, without replacement. The first
leaf in depth-first order is accepted with probability w, with its whole path. Else it is deleted and its parent v is
updated: r = (w_v p_v - q_v)+, S = sum r, p_v = r / S, w_v = S / (S + 1 - w_v), q_v without x.

Accepts more than `multi_draft`; on a chain it is `block`.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds
from speculant.verification.block import share
from speculant.verification.rejection import draft_probs, ratio_of


class Traversal(Verifier):
    """See the module's docstring."""

    lossless = True
    needs = VerifierNeeds(shared_noise=False, branches=True)

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Siblings are in the order in which they were drawn."""
        state = _RemainingTree(tree, p)
        while True:
            path = state.first_leaf()
            if not path or chance.accept(state.weight(path)):
                return Verdict(tuple(path), chance.draw(state.probs[path[-1] if path else -1]))
            state.delete(path)


class _RemainingTree:
    """The nodes that are not deleted, with their weights and distributions; the root is node -1."""

    def __init__(self, tree: DraftTree, p: Tensor) -> None:
        self._tokens, self._q = tree.token_list, draft_probs(tree, p)
        self._children = {node: tree.children(node) for node in range(-1, tree.size)}
        self._weights = {-1: 1.0}  # of the root and of nodes with a deleted child; others follow from their ancestors
        self.probs = {node: p[1 + node] for node in range(-1, tree.size)}

    def first_leaf(self) -> list[int]:
        """Return the path to the first leaf; empty once only the root is left."""
        path, node = list[int](), -1
        while self._children[node]:
            node = self._children[node][0]
            path.append(node)
        return path

    def weight(self, path: list[int]) -> float:
        """Return w of a path's last node; nodes with a deleted child have a stored weight."""
        above, weight = -1, self._weights[-1]
        for node in path:
            token = self._tokens[node]
            weight = min(1.0, weight * ratio_of(float(self.probs[above][token]), float(self._q[node, token])))
            if node in self._weights:
                weight = self._weights[node]
            above = node
        return weight

    def delete(self, path: list[int]) -> None:
        """Delete a rejected leaf and update its parent's distribution and weight."""
        leaf, parent = path[-1], path[-2] if len(path) > 1 else -1
        weight = self.weight(path[:-1]) if len(path) > 1 else self._weights[-1]
        rest = (weight * self.probs[parent] - self._q[leaf]).clamp(min=0)
        owed = float(rest.sum())
        if owed > 0:
            self.probs[parent] = rest / owed
        self._weights[parent] = share(owed, weight)
        self._children[parent].remove(leaf)


def build() -> Traversal:
    """Make the verifier."""
    return Traversal()
