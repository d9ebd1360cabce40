"""One step's work, as the scheduler hands it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from speculant.cache import KVCache, ReservationPlan, Source
from speculant.scheduling.fairness import Accounts
from speculant.types import NO_WORK, Client, DraftTree, Request, StepWork

NO_DRAFT = DraftTree.empty()
STEP_S = 0.05  # while several clients have sequences
ALONE_S = 0.1  # while one client has: fewer passes are split, and a newcomer waits for one step at most


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


class WorkBudget:
    """The time of one step's work that is left for each client: the work of its sequences (speculant/types.py).

    A sequence whose work does not fit waits for the next step. A prompt with log-probabilities or a beam search uses
    fewer rows instead. Each client gets the work of one sequence per step in any case. weights: of the clients whose
    sequences have any; they share the time.
    """

    def __init__(self, seconds: float, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._left = {name: seconds * weight / total for name, weight in weights.items()}
        self._firsts = set(weights)  # clients that have taken nothing

    @classmethod
    def of(cls, running: Sequence[Request], accounts: Accounts) -> WorkBudget | None:
        """Return the time for the work of a step; None if no running sequence has any."""
        busy = dict[str, Client]()
        for request in running:
            if request.work is not NO_WORK:
                busy[request.client.name] = request.client
        if not busy:
            return None
        weights = {name: accounts.of(client).weight for name, client in busy.items()}
        return cls(ALONE_S if accounts.few else STEP_S, weights)

    def rows(self, request: Request, budget: int, backlog: int, least: int) -> int:
        """Return how many of `budget` rows there is time for, and take that time; 0 = the request waits.

        Rows whose results are used have work: those of newest tokens and of live hypotheses, and all rows of a prompt
        whose log-probabilities are wanted. least: the fewest rows that a beam search can use.
        """
        name, own, search = request.client.name, request.work, request.search
        if request.wants_prompt_logits:
            return self.take(name, own, min(backlog, budget))
        if own is NO_WORK or budget < backlog:
            return budget
        wanted = 1 if search is None else len(search.beams.unscored)
        taken = self.take(name, own, wanted)
        if search is None or taken in (0, wanted):
            return budget if taken else 0
        return min(budget, max(least, backlog + search.beams.live_tree.size * taken // wanted))

    def take(self, client: str, work: StepWork, rows: int, least: int = 1, more_s: float = 0.0) -> int:
        """Take time for up to `rows` rows with results; return for how many, 0 if it does not last for `least`.

        more_s: the time of each row beside its own work.
        """
        row_s = work.row_s + more_s
        if not work.row_s or not rows:
            return rows
        fits = min(rows, max(0, int(self._left[client] / row_s + 1e-6)))
        if client in self._firsts:
            fits = max(fits, min(rows, least))
        if fits < least:
            return 0
        self._firsts.discard(client)
        self._left[client] -= fits * row_s
        return fits


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
