"""One step's work, as the scheduler hands it out: its rows are divided by the rules of order.py.

A source is encoded as a whole, in a step that has rows and memory for all of it. The sources of one client are encoded
in the order of its requests: none waits for those of later requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from speculant.cache import KVCache, ReservationPlan, Source
from speculant.config import Limits
from speculant.scheduling.order import Accounts, Standings, by_client, divide
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


class RowDivision:
    """Divides the rows of each step among the running sequences, and their room in the target's cache."""

    def __init__(self, limits: Limits, standings: Standings) -> None:
        self._budget, self._standings = limits.max_num_batched_tokens, standings
        self.late = dict[int, int]()  # of running sequences: the last steps whose time did not last for their work

    def divide(
        self, plan: ReservationPlan, waited: Mapping[int, int]
    ) -> tuple[list[Scheduled], list[Encoding], WorkBudget | None] | None:
        """Divide the rows among the running requests, in order; None if one that is not the last finds no memory.

        waited: the steps in a row, by sequence, that had no time for its work.
        """
        standings, running, few = self._standings, self._standings.running, self._standings.accounts.few
        budgets, items, encoded, late = self._budgets(few), list[Scheduled](), dict[Source, Encoding](), set[str]()
        alone = len(running) == 1
        parts = {} if alone else self._parts(budgets)
        work, self.late = WorkBudget.of(running, standings.accounts), {}
        order = running if alone else sorted(running, key=standings.turn if few else standings.place)
        if waited:
            order = sorted(order, key=lambda request: -waited.get(request.seq_id, 0))
        for request in order:
            name, source = request.client.name, standings.sources.of(request.seq_id) if request.source else None
            if source is not None and source not in encoded and not standings.sources.is_encoded(source):
                encoding = self._encoding(source, request)
                if name in late or encoding.num_rows > budgets[name]:
                    late.add(name)
                    continue
                if not plan.take(source.seq_id, encoding.num_rows):
                    if request is standings.last():
                        continue
                    return None
                encoded[source] = encoding
                budgets[name] -= encoding.num_rows
            budget = min(budgets[name], parts.get(request.call, budgets[name]))
            if work is not None:
                budget = work.rows(request, budget, standings.backlog(request), self._least(request))
                if not budget:
                    self.late[request.seq_id] = waited.get(request.seq_id, 0) + 1
                    continue
            item = self._item(request, source, budget, plan)
            if item is not None:
                items.append(item)
                budgets[name] -= item.count + item.tree.size
                if request.call in parts:
                    parts[request.call] -= item.num_rows
            elif self._least(request) <= budget and request is not standings.last():
                return None
        return items, [*encoded.values()], work

    def _encoding(self, source: Source, first: Request) -> Encoding:
        others = [other for other in self._standings.running if other.seq_id in source.holders and other is not first]
        return Encoding(source, [first, *others])

    def _budgets(self, few: bool) -> dict[str, int]:
        """Return the rows of this step that each client with running requests may use; few: there is one at most.

        The client with the lowest counter gets at least the rows that its widest beam search needs, or its longest
        source beside its other requests, so that each client gets them in its turn.
        """
        standings, budget = self._standings, self._budget
        if few:
            return {standings.running[0].client.name: budget} if standings.running else {}
        needs, least, weights = Counter[str](), Counter[str](), dict[str, float]()
        longest, counts = Counter[str](), Counter[str]()  # the longest source, and the requests
        for request in sorted(standings.running, key=standings.place, reverse=True):
            name, fewest, unencoded = request.client.name, self._least(request), standings.unencoded(request)
            needs[name] += max(fewest, self._wanted(request)) + unencoded
            least[name] = max(least[name], fewest)
            longest[name], counts[name] = max(longest[name], unencoded), counts[name] + 1
            weights[name] = standings.accounts.of(request.client).weight
        first = next(reversed(needs), "")
        if longest[first]:
            least[first] = max(least[first], longest[first] + counts[first] - 1)
        parts = divide(budget, needs, weights)
        if parts.get(first, 0) < least[first]:
            del needs[first]
            parts = {first: least[first], **divide(budget - least[first], needs, weights)}
        return parts

    def _parts(self, budgets: Mapping[str, int]) -> dict[tuple[str, ...], int]:
        """Return the most rows that requests with several running sequences, or beams, may use of their client's.

        The requests of one sequence use the rest in their order.
        """
        running = self._standings.running
        counts = Counter(request.call for request in running)
        wide = {each.call for each in running if counts[each.call] > 1 or each.search is not None}
        parts = dict[tuple[str, ...], int]()
        if not wide or len(counts) < 2:
            return parts
        for name, own in by_client(running).items():
            needs, least = Counter[tuple[str, ...]](), dict[tuple[str, ...], int]()
            for request in own:
                least[request.call] = self._least(request)
                needs[request.call] += max(self._least(request), self._wanted(request))
            divided = divide(budgets[name], needs, dict.fromkeys(needs, 1.0))
            parts.update((each, max(least[each], rows)) for each, rows in divided.items() if each in wide)
        return parts

    def _wanted(self, request: Request) -> int:
        """Return how many rows a request would use."""
        backlog = self._standings.backlog(request)
        if request.params.prompt_logprobs is not None and request.wants_prompt_logits and request.work.row_s:
            return min(backlog, 1 + int(STEP_S / request.work.row_s))
        return backlog if request.search is None else backlog + request.search.beams.live_tree.size

    def _item(self, request: Request, source: Source | None, budget: int, plan: ReservationPlan) -> Scheduled | None:
        """Take a request's work within budget and room from the plan, and return it if there is any.

        Where no hypothesis fits after it, the newest token is left for a later step.
        """
        start, search = self._standings.target.length(request.seq_id), request.search
        count = len(request.tokens) - start
        if search is None and 0 < count <= budget and plan.take(request.seq_id, count):  # the usual case
            return Scheduled(request, start, count, source=source)
        most = min(budget, plan.room(request.seq_id))
        item = Scheduled(request, start, min(count, most), source=source)
        if item.completes and search is not None:
            item = replace(item, tree=search.beams.waiting_tree(most - item.count))
            if not item.tree.size and request.num_positions > len(request.tokens):
                item = replace(item, count=item.count - 1)
        plan.take(request.seq_id, item.num_rows)
        return item if item.count else None

    def _least(self, request: Request) -> int:
        """Return the fewest rows that a request can use: its newest token needs one hypothesis after it."""
        return 1 if self._standings.backlog(request) > 1 else 1 + request.num_positions - len(request.tokens)
