"""How many nodes a draft may have: the policy's length, cut to what can be committed and fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from speculant.scheduling.scheduler import Schedule
from speculant.types import Request


class DraftBounds(NamedTuple):
    """Bounds of one sequence's draft in addition to budget and memory.

    max_len: the longest sequence that target and drafter can hold. max_nodes: the drafter's own limit; None = none.
    nodes_per_beam: nodes that it drafts per beam and round of a beam search; 0 = beam searches get no drafts.
    """

    max_len: int
    max_nodes: int | None = None
    nodes_per_beam: int = 0


NO_DRAFT = DraftBounds(max_len=0)  # of a sequence without a drafter


def draft_limits(
    schedule: Schedule, lengths: Sequence[int], bounds: Sequence[DraftBounds], most_nodes: int
) -> list[int]:
    """Return the number of nodes that each sequence's draft may have.

    A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens or max_len. All drafts of a step have
    at most `most_nodes` nodes. They use, in order, the budget and cache room that the step's tokens leave, and never
    cause preemption.

    In a beam search a length counts rounds of nodes_per_beam nodes per beam. The nodes follow all live hypotheses,
    including those that the step would otherwise not compute.
    """
    limits, budget, plan = [], min(schedule.spare_tokens, most_nodes), schedule.plan
    for item, wanted, bound in zip(schedule.items, lengths, bounds, strict=True):
        nodes, search = min(wanted, room(item.request, bound.max_len)), item.request.search
        if search is not None:
            nodes *= search.beams.width * bound.nodes_per_beam
        elif bound.max_nodes is not None:
            nodes = min(nodes, bound.max_nodes)
        if nodes <= 0 or not item.decodes:
            limits.append(0)
            continue
        taken = nodes + (0 if search is None else search.beams.live_tree.size - item.tree.size)
        if taken > budget or not plan.take(item.request.seq_id, taken):
            uncomputed = taken - nodes
            nodes = max(0, min(nodes, min(budget, plan.room(item.request.seq_id)) - uncomputed))
            taken = nodes + uncomputed if nodes else 0
            plan.take(item.request.seq_id, taken)
        limits.append(nodes)
        budget -= taken
    return limits


def room(request: Request, max_len: int) -> int:
    """Return the longest chain whose acceptance and one more token stay within max_tokens and max_len."""
    left = max_len - request.num_positions - 1
    if request.params.max_tokens is not None:
        left = min(left, request.params.max_tokens - (request.num_positions - len(request.prompt)) - 1)
    return left
