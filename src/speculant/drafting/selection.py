"""The selection between candidate drafters' drafts for one sequence, which a draft-length policy may make.

A drafter that combines others uses it. Verification stays exact: the selection depends on the scores of a deterministic
draft and on earlier acceptance, never on a token that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from speculant.types import DraftTree, Request


class Selector(Protocol):
    """What a draft-length policy decides about the drafts of one sequence."""

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Whether a deterministic draft with scores is worth more than one that a model would draw.

        scores, parents: those of its nodes, parents first, likeliest first.
        """
        ...

    def longest_unscored(self, request: Request) -> int | None:
        """Return the most nodes of a draft that a model draws in this step; None = no bound but the limit."""
        ...


@dataclass
class Selection:
    """Selects by an engine's draft-length policy; None = the first drafter with a draft."""

    selector: Selector | None = None

    def accepts(self, request: Request, tree: DraftTree) -> bool:
        """Whether a draft is selected although a candidate drafter with a model remains."""
        if self.selector is None or tree.scores is None or tree.probs is not None or request.search is not None:
            return True
        return self.selector.prefers(request, tree.scores, tree.parent_list)

    def bound(self, request: Request, limit: int) -> int:
        """Return a limit cut to the nodes that a model should draw."""
        longest = self.selector.longest_unscored(request) if self.selector is not None else None
        return limit if longest is None else min(limit, longest)
