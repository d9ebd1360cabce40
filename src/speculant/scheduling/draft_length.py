"""How many draft nodes a sequence gets in a step. Zero is normal."""

from __future__ import annotations

from typing import Protocol

from speculant.scheduling.scheduler import Schedule
from speculant.types import Request


class DraftLength(Protocol):
    """A rule that looks at the past alone, never at drawn tokens (algorithms for ratio rules)."""

    def choose(self, request: Request) -> int:
        """Return how many nodes are wanted for a request."""
        ...


class Fixed:
    """The configured length for everyone; a request may ask for another (seed 001)."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, request: Request) -> int:
        """See `DraftLength.choose`."""
        wanted = request.params.speculation
        if wanted is False:
            return 0
        if isinstance(wanted, bool) or wanted is None:
            return self._length
        return int(wanted.get("num_speculative_tokens", self._length))


def draft_limits(schedule: Schedule, rule: DraftLength, max_nodes: int | None, max_len: int) -> list[int]:
    """Return each sequence's limit: the rule's wish, cut to what can still matter and fit.

    A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens or max_len
    (overflow guard, seed 001). The nodes of all share what the step's tokens left of the budget and
    of the cache, in order: drafts never set anybody aside.
    """
    limits, budget, plan = [], schedule.spare_tokens, schedule.plan
    for item in schedule.items:
        wish = min(rule.choose(item.request), room(item.request, max_len)) if item.decodes else 0
        wish = wish if max_nodes is None else min(wish, max_nodes)
        limits.append(max(0, min(wish, budget, plan.room(item.request.seq))))
        plan.take(item.request.seq, limits[-1])
        budget -= limits[-1]
    return limits


def room(request: Request, max_len: int) -> int:
    """Return the most nodes whose acceptance and one more token stay within max_tokens and max_len."""
    left = max_len - len(request.tokens) - 1
    if request.params.max_tokens is not None:
        left = min(left, request.params.max_tokens - request.num_output - 1)
    return left
