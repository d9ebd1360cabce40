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
    """The configured length for everyone; a request may ask for another (docs/references.md, configuration)."""

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


def draft_limits(
    schedule: Schedule, rule: DraftLength, max_nodes: int | None, max_len: int, nodes_per_beam: int | None = None
) -> list[int]:
    """Return each sequence's limit: the rule's wish, cut to what can still matter and fit.

    A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens or max_len
    (docs/references.md, overflow guard). The nodes of all share what the step's tokens left of the budget and
    of the cache, in order: drafts never set anybody aside.

    In a beam search it is rounds that are wished for: each takes nodes_per_beam nodes for every beam. None = it
    can't be drafted for. They go behind all live hypotheses, those that the step would not feed without them too.
    """
    limits, budget, plan = [], schedule.spare_tokens, schedule.plan
    for item in schedule.items:
        wish, beams = min(rule.choose(item.request), room(item.request, max_len)), item.request.beams
        if beams is not None:
            wish *= beams.width * (nodes_per_beam or 0)
        elif max_nodes is not None:
            wish = min(wish, max_nodes)
        wish = wish if item.decodes else 0
        also = item.request.live_tree().size - item.tree.size if wish > 0 else 0
        limits.append(max(0, min(wish, min(budget, plan.room(item.request.seq_id)) - also)))
        taken = limits[-1] + also if limits[-1] else 0
        plan.take(item.request.seq_id, taken)
        budget -= taken
    return limits


def room(request: Request, max_len: int) -> int:
    """Return the longest chain whose acceptance and one more token stay within max_tokens and max_len."""
    left = max_len - request.reached - 1
    if request.params.max_tokens is not None:
        left = min(left, request.params.max_tokens - (request.reached - len(request.prompt)) - 1)
    return left
