"""Decides how many tokens of each sequence a step computes.

There is no prefill or decode phase: a step computes tokens that are not in the cache, within the token
budget and the caches' memory. A sequence that lacks only its newest token may also get a draft. The live
hypotheses of a beam search are not a draft: all have to be computed, if necessary over several steps.

    add ---> waiting ---admit---> running ---remove--->
                ^                    |
                +------preempt-------+      for memory, or for a client without a place: its blocks are released, and
                                            its tokens recomputed later

Places and rows are divided among clients, and a client's among its requests, which a policy orders
(scheduling/order.py).

A source is encoded as a whole, in a step that has rows and memory for all of it. The sources of one client are encoded
in the order of its requests, so no source waits for a later one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from speculant.cache import KVCache, PreparedPrefixes, ReservationPlan, Source
from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.scheduling.order import (
    CALL,
    TURN,
    Accounts,
    Holding,
    Key,
    Standings,
    WaitingRequests,
    by_client,
    divide,
    last_of,
    surplus,
    width,
    yields,
)
from speculant.types import NO_WORK, Client, DraftTree, Request, StepWork

NO_DRAFT = DraftTree.empty()
STEP_S = 0.05  # while several clients have sequences
ALONE_S = 0.1  # while one client has: fewer passes are split, and a newcomer waits for one step at most


@dataclass(slots=True)
class Scheduled:
    """`count` committed tokens of a request that this step computes, from position `start` on.

    tree: the live hypotheses of a beam search that are computed after the newest of them. source: what the encoder of
    an encoder-decoder model has read, at the latest in this step. num_rows: rows that it takes of the budget and of the
    cache. completes: the newest token is among its tokens, so that a next one can be chosen. decodes: only that token
    was missing, so that a draft may follow it and all live hypotheses.
    """

    request: Request
    start: int
    count: int
    tree: DraftTree = NO_DRAFT
    source: Source | None = None
    num_rows: int = field(init=False)
    completes: bool = field(init=False)
    decodes: bool = field(init=False)

    def __post_init__(self) -> None:
        search = self.request.search
        self.num_rows = self.count + self.tree.size
        self.completes = self.start + self.count == len(self.request.tokens)
        self.decodes = self.completes and self.count == 1 and (search is None or search.beams.completed_by(self.tree))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt among the input tokens."""
        return max(0, min(self.count, len(self.request.prompt) - self.start))

    @property
    def tokens(self) -> list[int]:
        """The input tokens."""
        return self.request.tokens[self.start : self.start + self.count]


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
                busy[request.sender.client.name] = request.sender.client
        if not busy:
            return None
        weights = {name: accounts.of(client).weight for name, client in busy.items()}
        return cls(ALONE_S if accounts.few else STEP_S, weights)

    def rows(self, request: Request, budget: int, backlog: int, least: int) -> int:
        """Return how many of `budget` rows there is time for, and take that time; 0 = the request waits.

        Rows whose results are used have work: rows of newest tokens, rows of live hypotheses, and all rows of a prompt
        whose log-probabilities are wanted. least: the fewest rows that a beam search can use.
        """
        name, own, search = request.sender.client.name, request.work, request.search
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
    Drafts may use the rest of both. sources: to encode before the items are computed. work: the time that is left for
    the work of drafts; None = no sequence has such work.
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
            plan = ReservationPlan(cache)
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
        items, encoded, late = list[Scheduled](), dict[Source, Encoding](), set[str]()
        budgets = {running[0].sender.client.name: self._budget} if few and running else self._budgets()
        alone = len(running) == 1
        parts = {} if alone else self._parts(budgets)
        work, self.late = WorkBudget.of(running, standings.accounts), {}
        order = running if alone else sorted(running, key=standings.turn if few else standings.place)
        if waited:
            order = sorted(order, key=lambda request: -waited.get(request.seq_id, 0))
        for request in order:
            name, source = request.sender.client.name, standings.sources.of(request.seq_id) if request.source else None
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
                budgets[name] -= item.num_rows
                if request.call in parts:
                    parts[request.call] -= item.num_rows
            elif self._least(request) <= budget and request is not standings.last():
                return None
        return items, [*encoded.values()], work

    def _encoding(self, source: Source, first: Request) -> Encoding:
        others = [other for other in self._standings.running if other.seq_id in source.holders and other is not first]
        return Encoding(source, [first, *others])

    def _budgets(self) -> dict[str, int]:
        """Return the rows of this step that each client with running requests may use.

        The client with the lowest counter gets at least the rows that its widest beam search needs, or its longest
        source beside its other requests, so that each client gets them in its turn.
        """
        standings, budget = self._standings, self._budget
        needs, least, weights = Counter[str](), Counter[str](), dict[str, float]()
        longest, counts = Counter[str](), Counter[str]()  # the longest source, and the requests
        for request in sorted(standings.running, key=standings.place, reverse=True):
            name, fewest, unencoded = request.sender.client.name, self._least(request), standings.unencoded(request)
            needs[name] += max(fewest, self._wanted(request)) + unencoded
            least[name] = max(least[name], fewest)
            longest[name], counts[name] = max(longest[name], unencoded), counts[name] + 1
            weights[name] = standings.accounts.of(request.sender.client).weight
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
        counts = Counter(map(CALL, running))
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
        start, count = self._standings.target.next_part(request.seq_id, len(request.tokens))
        search = request.search
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


logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the waiting and the running requests. Admission depends on `target`, the target's cache, alone.

    Drafters have caches of their own and draft for the requests that fit there. Drafters with state per sequence limit
    how many positions a request may take over from the prefix index: `most_matched` returns that number. salt: see
    `ModelNeeds.salt`. A running request whose salt has changed is computed again. prepared: is told what requests use.
    """

    def __init__(
        self,
        limits: Limits,
        target: KVCache,
        most_matched: Callable[[Request], int],
        salt: Callable[[Request], str] = attrgetter("sender.cache_salt"),
        prepared: PreparedPrefixes | None = None,
    ) -> None:
        self._prepared = prepared
        self._limits, self._target, self._most_matched, self._salt = limits, target, most_matched, salt
        self._salts: dict[int, str] = {}  # of the keys and values that running requests have in the cache
        self._step = 0
        self._read = set[int]()  # requests whose prefixes were read from the disk
        self._read_s = 0.0  # that are left for reading in this step
        self._unstarted: dict[int, Request] = {}  # running requests without a scheduled token
        self._gained: dict[int, int] = {}  # of running requests: steps with other clients that gave them tokens
        self.standings = Standings(limits, target)
        self.sources, self._accounts = self.standings.sources, self.standings.accounts
        self.running, self.waiting = self.standings.running, WaitingRequests(self.standings.turn)
        self._division = RowDivision(limits, self.standings)

    def num_vacant(self, client: Client) -> int:
        """Return how many more requests of a client are accepted: its part of max_num_seqs + max_waiting places."""
        return max(0, self._accounts.vacant_places(client, self._num_places))

    @property
    def _num_places(self) -> int:
        return self._limits.max_num_seqs + self._limits.max_waiting

    def check_size(self, count: int) -> None:
        """Raise CapacityError if `count` requests can never be accepted together."""
        if count > self._num_places:
            raise CapacityError(
                f"{count} sequences come together and max_num_seqs + max_waiting is {self._num_places}",
                "lower n, or raise max_waiting.",
            )

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests of one client together; raises CapacityError if the queue has no places for them."""
        if len(requests) > self.num_vacant(requests[0].sender.client):
            raise CapacityError(
                f"{len(self.running)} sequences run and {len(self.waiting)} wait, {len(requests)} more came and "
                f"max_num_seqs + max_waiting is {self._num_places}, shared by the clients",
                "try again later, or raise max_waiting.",
            )
        for request in requests:
            self._accounts.enter(request.sender.client)
            self.standings.queue(request, self._step)
            self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a waiting or running request and release its blocks of the target's cache.

        If it was the only running sequence of its request, the others wait like a new request, after requests that
        came meanwhile. So requests take turns where there are more of them than places.
        """
        if request not in self.running:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            if not self.standings.has_begun(request):
                for sibling in self.waiting.siblings(request):
                    self.standings.queue(sibling, self._step)
                self.waiting.end(request)
        self.standings.forget(request)
        self._read.discard(request.seq_id)
        self._accounts.leave(request.sender.client)
        self._stop(request)

    def schedule(self) -> Schedule:
        """Admit requests that fit, then share the token budget; preempt the last request while memory is short."""
        self._step, self._read_s = self._step + 1, STEP_S
        for request in self.running:  # others may have computed the prefix of one that is not started
            salt = self._salts.get(request.seq_id, request.sender.cache_salt)
            if salt != self._salt(request) or request.seq_id in self._unstarted:
                self._target.release(request.seq_id)
                self._start(request)
        admitted, preempted = self._admit() if self.waiting else ([], [])
        plan, waited = ReservationPlan(self._target), self._division.late
        while (divided := self._division.divide(plan, waited)) is None:
            preempted.append(self.standings.last())
            self._preempt(preempted[-1])
            plan = ReservationPlan(self._target)
        (items, sources, work), spare = divided, self._limits.max_num_batched_tokens
        for item in items:
            spare -= item.num_rows
            self._unstarted.pop(item.request.seq_id, None)
        for encoding in sources:
            spare -= encoding.num_rows
        if not self._accounts.few:
            self._charge(items, sources)
        return Schedule(items, plan, spare, admitted, preempted, sources, work)

    @property
    def shares(self) -> bool:
        """Whether several clients have sequences, so that their use is counted."""
        return not self._accounts.few

    def charge(self, rows: Mapping[str, float]) -> None:
        """Charge clients for time beside their rows of a step: the rows that would have taken as long."""
        self._accounts.charge(rows)

    def _charge(self, items: Sequence[Scheduled], sources: Sequence[Encoding]) -> None:
        """Charge each client for its rows of a step, and count the steps that gave requests a token."""
        used = Counter[str]()
        for item in items:
            used[item.request.sender.client.name] += item.num_rows
            self._gained[item.request.seq_id] = self._gained.get(item.request.seq_id, 0) + item.completes
        for encoding in sources:
            used[encoding.requests[0].sender.client.name] += encoding.num_rows
        self._accounts.charge(used)

    def _admit(self) -> tuple[list[Request], list[Request]]:
        """Start waiting requests while their missing tokens fit; return them, and the requests preempted for them."""
        admitted, preempted = list[Request](), list[Request]()
        while self.waiting and (claims := self._claims()):
            request: Request | None = claims[0]
            if not self._fetched(claims[0]):
                break  # the others go on, and the next step reads more from the disk
            if not self._run(claims[0]):
                if (yielding := self._yielding_to(claims[0])) is not None:
                    self._preempt(yielding)
                    preempted.append(yielding)
                    continue
                request = self._exchange(preempted)
            if request is None:
                break
            admitted.append(request)
        return admitted, preempted

    def _fetched(self, request: Request) -> bool:
        """Whether what is on disk of a request's prefix is in memory, once there is a place; read it for a while.

        It is read once: if the blocks leave the memory before the request can start, they are computed.
        """
        if (
            request.seq_id in self._read
            or request.wants_prompt_logits
            or len(self.running) >= self._limits.max_num_seqs
        ):
            return True
        started = time.perf_counter()
        is_read = self._read_s > 0 and self._target.fetch(request.tokens, self._salt(request), self._read_s)
        self._read_s -= time.perf_counter() - started
        if is_read:
            self._read.add(request.seq_id)
        return is_read

    def _claims(self) -> list[Request]:
        """Return the first waiting request of each client that has one which can start, the first of all first."""
        running, firsts = Counter(map(CALL, self.running)), dict[str, Request]()
        ready = dict[str, bool]()  # by prompt

        def is_ready(request: Request) -> bool:
            if request.request_id not in ready:
                ready[request.request_id] = not self._waits_for_sibling(request)
            return ready[request.request_id]

        def turn(request: Request) -> tuple[int, int, Key]:
            return request.sender.priority, running[request.call], self.standings.turn(request)

        for request in [*self.waiting.firsts_of_begun(is_ready), *self.waiting.firsts_of_others()]:
            other = firsts.setdefault(request.sender.client.name, request)
            firsts[request.sender.client.name] = request if other is request else min(other, request, key=turn)
        if len(firsts) < 2:
            return [*firsts.values()]
        holdings = self.standings.holdings()

        def claim(request: Request) -> tuple[float, float, int]:
            holding = holdings.get(request.sender.client.name) or Holding(self._accounts.of(request.sender.client))
            return holding.per_weight(), holding.account.counter, request.seq_id

        return sorted(firsts.values(), key=claim)

    def _exchange(self, preempted: list[Request]) -> Request | None:
        """Start a request of which nothing runs in the place of a surplus one of its client, and return it."""
        running = by_client(self.running)
        for claimant in self.waiting.firsts_of_others():
            own = running.get(claimant.sender.client.name, [])
            while (extra := surplus(own, claimant.sender.priority, self.standings.rank)) is not None:
                own.remove(extra)
                self._preempt(extra)
                preempted.append(extra)
                if self._run(claimant):
                    return claimant
        return None

    def _run(self, request: Request) -> bool:
        """Start a waiting request if a place and room for its missing tokens are free; return whether they are."""
        if len(self.running) >= self._limits.max_num_seqs:
            return False
        self._start(request)
        if self.running and not self._fits(request):
            self._stop(request)
            return False
        self.waiting.begin(request)
        self.running.append(request)
        self._unstarted[request.seq_id] = request
        return True

    def _yielding_to(self, claimant: Request) -> Request | None:
        """Return the running request of another client that is preempted for a waiting one, if there is one."""
        if self._accounts.few:
            return None
        holdings = self.standings.holdings()
        own = holdings.pop(claimant.sender.client.name, None) or Holding(self._accounts.of(claimant.sender.client))
        lasts = {name: last_of(each, self.standings.rank) for name, each in by_client(self.running).items()}
        giving = [
            name
            for name, each in holdings.items()
            if yields(each, width(lasts[name]), self._had_turn(lasts[name]), own, width(claimant))
        ]
        if not giving:
            return None
        return lasts[max(giving, key=lambda name: holdings[name].excess)]

    def _had_turn(self, request: Request) -> bool:
        return self._gained.get(request.seq_id, 0) >= TURN

    def _start(self, request: Request) -> None:
        """Hold the source, and take over cached positions: a sibling's prompt, else a matching prefix."""
        if request.source:
            self.sources.hold(request.seq_id, request.source, request.sender.cache_salt)
        salt = self._salts[request.seq_id] = self._salt(request)
        most = min(self._most_matched(request), len(request.tokens) - 1)
        start = min(most, len(request.prompt) - 1)
        sibling = next((r for r in self._siblings(request) if self._could_start(r, request, start)), None)
        if sibling is not None and not request.num_output:
            self._target.fork(sibling.seq_id, request.seq_id)
            self._target.truncate_to(request.seq_id, start)
        else:
            limit = 0 if request.wants_prompt_logits else most
            self._target.match_prefix(request.seq_id, request.tokens, salt, limit)
            if self._prepared is not None and self._prepared.waiting:
                self._prepared.use(request.seq_id)
        if not request.num_output and not request.metrics.num_preemptions:
            request.metrics.cached_tokens = self._target.length(request.seq_id)

    def _could_start(self, sibling: Request, request: Request, start: int) -> bool:
        """Whether a sibling has computed the prompt, and holds what a row at position `start` sees."""
        seq_id = sibling.seq_id
        return self._target.length(seq_id) >= len(request.prompt) and self._target.holds_window(seq_id, start)

    def _fits(self, request: Request) -> bool:
        """Whether the target's cache has room for all that the running requests and this one lack, sources included."""
        plan = ReservationPlan(self._target)
        if not all(plan.take(source.seq_id, len(source.tokens)) for source in self.sources.missing()):
            return False
        for other in self.running:
            missing = other.num_positions - self._target.length(other.seq_id)
            plan.take(other.seq_id, min(plan.room(other.seq_id), missing))
        return plan.room(request.seq_id) >= request.num_positions - self._target.length(request.seq_id)

    def _waits_for_sibling(self, request: Request) -> bool:
        """Whether a sibling's prompt is not yet computed: the other samples start from its cache."""
        siblings = self._siblings(request)
        return bool(siblings) and all(self._target.length(other.seq_id) < len(request.prompt) for other in siblings)

    def _siblings(self, request: Request) -> list[Request]:
        """Return the running samples of the same prompt whose keys and values a request can take over."""
        siblings = [other for other in self.running if other.request_id == request.request_id]
        salt = self._salt(request)
        return [other for other in siblings if self._salts.get(other.seq_id, other.sender.cache_salt) == salt]

    def _preempt(self, request: Request) -> None:
        """Release a request's blocks and queue it again; its tokens are recomputed once it is admitted."""
        self.running.remove(request)
        self._read.discard(request.seq_id)
        self._stop(request)
        self.waiting.add(request)
        if not self.standings.has_begun(request):
            self.waiting.end(request)
        request.metrics.num_preemptions += 1
        logger.debug("request %s is preempted after %d tokens", request.request_id, len(request.tokens))

    def _stop(self, request: Request) -> None:
        """Release the blocks of a request, and delete the records that only running requests have."""
        for noted in (self._unstarted, self._salts, self._gained):
            noted.pop(request.seq_id, None)
        self._target.release(request.seq_id)
        self.sources.release(request.seq_id)
