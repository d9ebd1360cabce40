"""The choice between drafts of several drafters for one sequence, which a draft-length policy may make.

A drafter that combines others (fallback.py) asks it. Verification stays exact: the choice sees the scores of a
deterministic draft and what was accepted in the past, never a token that is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from speculant.types import DraftTree, Request


@runtime_checkable
class Judge(Protocol):
    """A draft-length policy that knows what drafts cost and how often they are accepted."""

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Whether a deterministic draft with scores is worth more than one that a model would draw.

        scores, parents: those of its nodes, parents first, likeliest first.
        """
        ...

    def longest_unscored(self, request: Request) -> int | None:
        """Return the most nodes of a draft that a model draws in this step; None = no bound but the limit."""
        ...


@dataclass
class Arms:
    """The judge of an engine: its draft-length policy, if that is one. None = the first drafter with a draft wins."""

    judge: Judge | None = None

    def take(self, request: Request, tree: DraftTree) -> bool:
        """Whether a draft is verified although another drafter could be asked."""
        if self.judge is None or tree.scores is None or tree.probs is not None or request.search is not None:
            return True
        return self.judge.prefers(request, tree.scores, tree.parent_list)

    def bound(self, request: Request, limit: int) -> int:
        """Return a limit cut to what a model should draw."""
        longest = self.judge.longest_unscored(request) if self.judge is not None else None
        return limit if longest is None else min(limit, longest)
