"""One step's work, as the scheduler hands it out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from speculant.cache.paged import KVCache, ReservationPlan
from speculant.cache.sources import Source
from speculant.scheduling.work_budget import WorkBudget
from speculant.types import DraftTree, Request

NO_DRAFT = DraftTree.empty()


@dataclass(slots=True)
class Scheduled:
    """`count` committed tokens of a request that this step computes, from position `start` on.

    tree: the live hypotheses of a beam search that are computed after the newest of them. source: what the encoder of
    an encoder-decoder model has read, at the latest in this step.
    """

    request: Request
    start: int
    count: int
    tree: DraftTree = NO_DRAFT
    source: Source | None = None

    @property
    def num_rows(self) -> int:
        """Rows that the item takes of the budget and of the cache."""
        return self.count + self.tree.size

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt among the input tokens."""
        return max(0, min(self.count, len(self.request.prompt) - self.start))

    @property
    def tokens(self) -> list[int]:
        """The input tokens."""
        return self.request.tokens[self.start : self.start + self.count]

    @property
    def completes(self) -> bool:
        """Whether the newest token is among them, so that a next one can be chosen."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether only the newest token was missing, so that a draft may follow it and all live hypotheses."""
        if self.count != 1 or self.start + 1 != len(self.request.tokens):
            return False
        return self.request.search is None or self.request.search.beams.completed_by(self.tree)


class Encoding(NamedTuple):
    """A source that a step encodes, and the running requests that hold it; the first one's client is charged."""

    source: Source
    requests: Sequence[Request]

    @property
    def num_rows(self) -> int:
        """Rows that it takes of the budget and of the cache."""
        return len(self.source.tokens)


@dataclass(slots=True)
class Schedule:
    """One step's work, and the requests that were admitted and preempted before it.

    `plan` has counted the rows of sources and items in the target's cache, and `spare_tokens` are left of the budget.
    Drafts may use the rest of both. sources: those that are encoded before the items are computed. work: the time that
    is left for the work of drafts; None = no sequence has any.
    """

    items: list[Scheduled]
    plan: ReservationPlan
    spare_tokens: int
    admitted: list[Request]
    preempted: list[Request]
    sources: Sequence[Encoding] = ()
    work: WorkBudget | None = None

    def one_by_one(self, cache: KVCache) -> Iterator[Schedule]:
        """Yield the same work one sequence at a time; each plan also counts the items that follow.

        The items of requests that end meanwhile, because their source can't be encoded, are left out.
        """
        for encoding in self.sources:
            yield replace(self, items=[], sources=[encoding])
        for index, item in enumerate(self.items):
            if item.request.finished:
                continue
            plan = cache.plan()
            for other in self.items[index:]:
                plan.take(other.request.seq_id, other.num_rows)
            yield replace(self, items=[item], sources=(), plan=plan)

    def culprits(self) -> Sequence[Request]:
        """Return the requests that end if the step fails; none if it must be repeated one by one to find them."""
        works = [*(encoding.requests for encoding in self.sources), *([item.request] for item in self.items)]
        found = {request.seq_id: request for work in works for request in work}
        return [*found.values()] if len(works) == 1 or len(found) == 1 else ()

    def roll_back(self, cache: KVCache) -> None:
        """Drop the positions that a failed step reserved, so that the next step starts where this one did."""
        for source, _ in self.sources:
            cache.release(source.seq_id)
        for item in self.items:
            if cache.length(item.request.seq_id) > item.start:
                cache.truncate_to(item.request.seq_id, item.start)
