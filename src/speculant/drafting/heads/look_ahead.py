"""Drafts with look-ahead rows in the target's pass, which are no proposals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor
from typing_extensions import override

from speculant.errors import DraftError
from speculant.types import DraftTree


class LookAheadTree(DraftTree):
    """A draft with a chain of look-ahead rows below the root and below each node; it may have no nodes.

    inputs: the input embeddings [k, hidden] of a chain.
    """

    inputs: Tensor

    @classmethod
    def around(cls, draft: DraftTree, inputs: Tensor) -> LookAheadTree:
        """Return the same draft with look-ahead rows."""
        tree = cls.__new__(cls)
        vars(tree).update(vars(draft), inputs=inputs, num_rows=draft.size + (draft.size + 1) * len(inputs))
        return tree

    @cached_property
    def parents_of_rows(self) -> list[int]:
        """The parents of all rows: the nodes, then the chain of the root and of each node."""
        parents = list(self.parent_list)
        for node in range(-1, self.size):
            parents += (node, *range(len(parents), len(parents) + len(self.inputs) - 1))
        return parents

    @override
    def pass_rows(self) -> tuple[DraftTree, Sequence[Tensor]]:
        tokens = [*self.token_list, *[0] * (self.num_rows - self.size)]
        return DraftTree.of(tokens, self.parents_of_rows), [*self.inputs] * (self.size + 1)

    @override
    def observed(self, kept: Sequence[int]) -> Sequence[int]:
        first = self.size + len(self.inputs) * (1 + kept[-1] if kept else 0)
        return *kept, *range(first, first + len(self.inputs))

    @override
    def first(self, count: int) -> DraftTree:
        return LookAheadTree.around(super().first(count), self.inputs)

    @override
    def check_rows(self, most: int) -> None:
        if not (self.inputs.ndim == 2 and 0 < len(self.inputs) <= most):
            raise DraftError(
                f"a draft has look-ahead rows of shape {list(self.inputs.shape)}, and {most} are allowed below each"
                " node",
                "announce them as DrafterNeeds.target_inputs, and add no more of them than the limit on nodes.",
            )
