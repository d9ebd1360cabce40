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
    own_rows: the most rows of its own below the root and each node, of which there are no more than nodes.
    """

    max_len: int
    max_nodes: int | None = None
    nodes_per_beam: int = 0
    own_rows: int = 0

    def within(self, nodes: int, rows: int) -> int:
        """Return how many of these nodes fit into so many rows, with the drafter's own."""
        nodes = max(0, min(nodes, rows))
        while nodes and num_rows(nodes, self.own_rows) > rows:
            nodes -= 1
        return nodes


NO_DRAFT = DraftBounds(max_len=0)  # of a sequence without a drafter


def draft_limits(
    schedule: Schedule, lengths: Sequence[int], bounds: Sequence[DraftBounds], most_nodes: int
) -> list[int]:
    """Return the number of nodes that each sequence's draft may have.

    A draft of n nodes commits at most n + 1 tokens, so it never passes max_tokens or max_len. All drafts of a step have
    at most `most_nodes` nodes. They use, in order, the budget and cache room that the step's tokens leave, and never
    cause preemption.

    Rows of a drafter's own take budget and room as nodes do. In a beam search a length counts rounds of nodes_per_beam
    nodes per beam. The nodes follow all live hypotheses, including those that the step would otherwise not compute.
    """
    limits, budget, plan = [], min(schedule.spare_tokens, most_nodes), schedule.plan
    for item, wanted, bound in zip(schedule.items, lengths, bounds, strict=True):
        nodes, search = min(wanted, room(item.request, bound.max_len)), item.request.search
        if search is not None:
            nodes *= search.beams.width * bound.nodes_per_beam
        elif bound.max_nodes is not None:
            nodes = min(nodes, bound.max_nodes)
        if bound.own_rows:
            nodes = bound.within(nodes, bound.max_len - item.request.num_positions - 1)
        if nodes <= 0 or not item.decodes:
            limits.append(0)
            continue
        uncomputed = 0 if search is None else search.beams.live_tree.size - item.tree.size
        taken = num_rows(nodes, bound.own_rows) + uncomputed
        if taken > budget or not plan.take(item.request.seq_id, taken):
            nodes = bound.within(nodes, min(budget, plan.room(item.request.seq_id)) - uncomputed)
            taken = num_rows(nodes, bound.own_rows) + uncomputed if nodes else 0
            plan.take(item.request.seq_id, taken)
        limits.append(nodes)
        budget -= taken
    return limits


def num_rows(nodes: int, own_rows: int, sequences: int = 1) -> int:
    """Return the rows of drafts of so many nodes with the drafter's own: up to `own_rows` below each root and node."""
    return nodes + (nodes + sequences) * min(nodes, own_rows)


def room(request: Request, max_len: int) -> int:
    """Return the longest chain whose acceptance and one more token stay within max_tokens and max_len."""
    left = max_len - request.num_positions - 1
    if request.params.max_tokens is not None:
        left = min(left, request.params.max_tokens - (request.num_positions - len(request.prompt)) - 1)
    return left
