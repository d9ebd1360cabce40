"""Decides how many tokens of each sequence a step computes.

There is no prefill or decode phase: a step computes tokens that are not in the cache, within the token
budget and the caches' memory. A sequence that lacks only its newest token may also get a draft. The live
hypotheses of a beam search are not a draft: all have to be computed, if necessary over several steps.

A source is encoded as a whole, in a step that has rows and memory for all of it. The sources of one client are encoded
in the order of its requests: none waits for those of later requests.

    add ---> waiting ---admit---> running ---remove--->
                ^                    |
                +------preempt-------+      for memory, or for a client without a place: its blocks are released, and
                                            its tokens recomputed later

Places and rows are divided among clients, and a client's among its requests (scheduling/fairness.py). A policy orders
the requests of one client (scheduling/policy.py).
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from speculant.cache.paged import KVCache, ReservationPlan
from speculant.cache.sources import Source, Sources
from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.scheduling.fairness import TURN, Accounts, Holding, by_client, divide, last_of, surplus, yields
from speculant.scheduling.policy import POLICIES, Key, Standing
from speculant.scheduling.schedule import Encoding, Schedule, Scheduled
from speculant.scheduling.waiting import WaitingRequests
from speculant.scheduling.work_budget import STEP_S, WorkBudget
from speculant.types import Client, Request

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the waiting and the running requests. Admission depends on `target`, the target's cache, alone.

    Drafters have caches of their own and draft for the requests that fit there. Drafters with state per sequence limit
    how many positions a request may take over from the prefix index: `most_matched` returns that number. salt: see
    `ModelNeeds.salt`. A running request whose salt has changed is computed again.
    """

    def __init__(
        self,
        limits: Limits,
        target: KVCache,
        most_matched: Callable[[Request], int],
        salt: Callable[[Request], str] = attrgetter("cache_salt"),
    ) -> None:
        self._limits, self._target, self._most_matched, self._salt = limits, target, most_matched, salt
        self._salts: dict[int, str] = {}  # of the running requests
        self._policy = POLICIES[limits.scheduling_policy]
        self._step = 0
        self._arrivals = itertools.count()
        self._queued_at: dict[int, tuple[int, int]] = {}  # step and arrival
        self._unstarted: dict[int, Request] = {}  # running requests without a scheduled token
        self._gained: dict[int, int] = {}  # of running requests: steps with other clients that gave them tokens
        self._accounts = Accounts(limits.max_model_len + TURN)
        self._late = dict[int, int]()  # of running sequences: the last steps whose time did not last for their work
        self.sources = Sources(target)
        self.waiting = WaitingRequests(self._turn)
        self.running: list[Request] = []

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
        if len(requests) > self.num_vacant(requests[0].client):
            raise CapacityError(
                f"{len(self.running)} sequences run and {len(self.waiting)} wait, {len(requests)} more came and "
                f"max_num_seqs + max_waiting is {self._num_places}, shared by the clients",
                "try again later, or raise max_waiting.",
            )
        for request in requests:
            self._accounts.enter(request.client)
            self._queued_at[request.seq_id] = self._step, next(self._arrivals)
            self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a waiting or running request and release its blocks of the target's cache.

        If it was the only running sequence of its request, the others wait like a new request, after those that came
        meanwhile. So requests take turns where there are more of them than places.
        """
        if request not in self.running:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            if not self._has_begun(request):
                for sibling in self.waiting.siblings(request):
                    self._queued_at[sibling.seq_id] = self._step, next(self._arrivals)
                self.waiting.end(request)
        del self._queued_at[request.seq_id]
        self._accounts.leave(request.client)
        self._stop(request)

    def schedule(self) -> Schedule:
        """Admit requests that fit, then share the token budget; preempt the last request while memory is short."""
        self._step += 1
        for request in self.running:  # others may have computed the prefix of one that is not started
            if request.seq_id in self._unstarted or self._held_salt(request) != self._salt(request):
                self._target.release(request.seq_id)
                self._start(request)
        admitted, preempted = self._admit()
        plan, waited = self._target.plan(), self._late
        while (shared := self._share(plan, waited)) is None:
            preempted.append(self._last())
            self._preempt(preempted[-1])
            plan = self._target.plan()
        (items, sources, work), spare = shared, self._limits.max_num_batched_tokens
        for item in items:
            spare -= item.count + item.tree.size
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
            used[item.request.client.name] += item.num_rows
            self._gained[item.request.seq_id] = self._gained.get(item.request.seq_id, 0) + item.completes
        for encoding in sources:
            used[encoding.requests[0].client.name] += encoding.num_rows
        self._accounts.charge(used)

    def _share(
        self, plan: ReservationPlan, waited: Mapping[int, int]
    ) -> tuple[list[Scheduled], list[Encoding], WorkBudget | None] | None:
        """Share the budgets among the running requests, in order; None if one that is not the last finds no memory.

        waited: the steps in a row, by sequence, that had no time for its work.
        """
        budgets, items, encoded, late = self._budgets(), list[Scheduled](), dict[Source, Encoding](), set[str]()
        place, alone = self._turn if self._accounts.few else self._place, len(self.running) == 1
        parts = {} if alone else self._parts(budgets)
        work, self._late = WorkBudget.of(self.running, self._accounts), {}
        order = self.running if alone else sorted(self.running, key=place)
        if waited:
            order = sorted(order, key=lambda request: -waited.get(request.seq_id, 0))
        for request in order:
            name, source = request.client.name, self._missing_source(request)
            if source is not None and source not in encoded:
                encoding = self._encoding(source, request)
                if name in late or encoding.num_rows > budgets[name]:
                    late.add(name)
                    continue
                if not plan.take(source.seq_id, encoding.num_rows):
                    if request is self._last():
                        continue
                    return None
                encoded[source] = encoding
                budgets[name] -= encoding.num_rows
            budget = min(budgets[name], parts.get(request.call, budgets[name]))
            if work is not None:
                budget = work.rows(request, budget, self._backlog(request), self._least(request))
                if not budget:
                    self._late[request.seq_id] = waited.get(request.seq_id, 0) + 1
                    continue
            item = self._item(request, budget, plan)
            if item is not None:
                items.append(item)
                budgets[name] -= item.count + item.tree.size
                if request.call in parts:
                    parts[request.call] -= item.num_rows
            elif self._least(request) <= budget and request is not self._last():
                return None
        return items, [*encoded.values()], work

    def _missing_source(self, request: Request) -> Source | None:
        """Return a running request's source unless it is encoded; None if it has none."""
        source = self.sources.of(request.seq_id)
        return None if source is None or self.sources.is_encoded(source) else source

    def _encoding(self, source: Source, first: Request) -> Encoding:
        others = [other for other in self.running if other.seq_id in source.holders and other is not first]
        return Encoding(source, [first, *others])

    def _budgets(self) -> dict[str, int]:
        """Return the rows of this step that each client with running requests may use.

        The client with the lowest counter gets at least the rows that its widest beam search needs, or its longest
        source beside its other requests, so that each client gets them in its turn.
        """
        budget = self._limits.max_num_batched_tokens
        if self._accounts.few:
            return dict.fromkeys((request.client.name for request in self.running), budget)
        needs, least, weights = Counter[str](), Counter[str](), dict[str, float]()
        longest, counts = Counter[str](), Counter[str]()  # the longest source, and the requests
        for request in sorted(self.running, key=self._place, reverse=True):
            name, fewest, unencoded = request.client.name, self._least(request), self._unencoded(request)
            needs[name] += max(fewest, self._wanted(request)) + unencoded
            least[name] = max(least[name], fewest)
            longest[name], counts[name] = max(longest[name], unencoded), counts[name] + 1
            weights[name] = self._accounts.of(request.client).weight
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
        counts = Counter(request.call for request in self.running)
        wide = {each.call for each in self.running if counts[each.call] > 1 or each.search is not None}
        parts = dict[tuple[str, ...], int]()
        if not wide or len(counts) < 2:
            return parts
        for name, own in by_client(self.running).items():
            needs, least = Counter[tuple[str, ...]](), dict[tuple[str, ...], int]()
            for request in own:
                least[request.call] = self._least(request)
                needs[request.call] += max(self._least(request), self._wanted(request))
            divided = divide(budgets[name], needs, dict.fromkeys(needs, 1.0))
            parts.update((each, max(least[each], rows)) for each, rows in divided.items() if each in wide)
        return parts

    def _wanted(self, request: Request) -> int:
        """Return how many rows a request would use."""
        backlog = self._backlog(request)
        if request.params.prompt_logprobs is not None and request.wants_prompt_logits and request.work.row_s:
            return min(backlog, 1 + int(STEP_S / request.work.row_s))
        return backlog if request.search is None else backlog + request.search.beams.live_tree.size

    def _item(self, request: Request, budget: int, plan: ReservationPlan) -> Scheduled | None:
        """Take a request's work within budget and room from the plan, and return it if there is any.

        Where no hypothesis fits after it, the newest token is left for a later step.
        """
        start, search = self._target.length(request.seq_id), request.search
        count = len(request.tokens) - start
        source = self.sources.of(request.seq_id)
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
        return 1 if self._backlog(request) > 1 else 1 + request.num_positions - len(request.tokens)

    def _admit(self) -> tuple[list[Request], list[Request]]:
        """Start waiting requests while their missing tokens fit; return them, and the requests preempted for them."""
        admitted, preempted = list[Request](), list[Request]()
        while self.waiting and (claims := self._claims()):
            request: Request | None = claims[0]
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

    def _claims(self) -> list[Request]:
        """Return the first waiting request of each client that has one which can start, the first of all first."""
        running, firsts = Counter(request.call for request in self.running), dict[str, Request]()
        ready = dict[str, bool]()  # by prompt

        def is_ready(request: Request) -> bool:
            if request.request_id not in ready:
                ready[request.request_id] = not self._waits_for_sibling(request)
            return ready[request.request_id]

        def turn(request: Request) -> tuple[int, int, Key]:
            return request.priority, running[request.call], self._turn(request)

        for request in [*self.waiting.firsts_of_begun(is_ready), *self.waiting.firsts_of_others()]:
            other = firsts.setdefault(request.client.name, request)
            firsts[request.client.name] = request if other is request else min(other, request, key=turn)
        if len(firsts) < 2:
            return [*firsts.values()]
        holdings = self._holdings()

        def claim(request: Request) -> tuple[float, float, int]:
            holding = holdings.get(request.client.name) or Holding(self._accounts.of(request.client))
            return holding.per_weight(), holding.account.counter, request.seq_id

        return sorted(firsts.values(), key=claim)

    def _exchange(self, preempted: list[Request]) -> Request | None:
        """Start a request of which nothing runs in the place of a surplus one of its client, and return it."""
        running = by_client(self.running)
        for claimant in self.waiting.firsts_of_others():
            own = running.get(claimant.client.name, [])
            while (extra := surplus(own, claimant.priority, self._rank)) is not None:
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
        holdings = self._holdings()
        own = holdings.pop(claimant.client.name, None) or Holding(self._accounts.of(claimant.client))
        lasts = {name: last_of(each, self._rank) for name, each in by_client(self.running).items()}
        giving = [
            name
            for name, each in holdings.items()
            if yields(each, _width(lasts[name]), self._had_turn(lasts[name]), own, _width(claimant))
        ]
        if not giving:
            return None
        return lasts[max(giving, key=lambda name: holdings[name].excess)]

    def _had_turn(self, request: Request) -> bool:
        return self._gained.get(request.seq_id, 0) >= TURN

    def _has_begun(self, request: Request) -> bool:
        """Whether a sequence of its request runs."""
        return any(other.call == request.call for other in self.running)

    def _holdings(self) -> dict[str, Holding]:
        """Return the holdings of the clients with running requests."""
        holdings: dict[str, Holding] = {}
        for request in self.running:
            held = holdings.get(request.client.name) or Holding(self._accounts.of(request.client))
            holdings[request.client.name] = Holding(
                held.account, held.num_requests + 1, held.num_sequences + _width(request)
            )
        return holdings

    def _start(self, request: Request) -> None:
        """Hold the source, and take over cached positions: a sibling's prompt, else a matching prefix."""
        if request.source:
            self.sources.hold(request.seq_id, request.source, request.cache_salt)
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
        if not request.num_output and not request.metrics.num_preemptions:
            request.metrics.cached_tokens = self._target.length(request.seq_id)

    def _could_start(self, sibling: Request, request: Request, start: int) -> bool:
        """Whether a sibling has computed the prompt, and holds what a row at position `start` sees."""
        seq_id = sibling.seq_id
        return self._target.length(seq_id) >= len(request.prompt) and self._target.holds_window(seq_id, start)

    def _fits(self, request: Request) -> bool:
        """Whether the target's cache has room for all that the running requests and this one lack, sources included."""
        plan = self._target.plan()
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
        return [other for other in siblings if self._held_salt(other) == salt]

    def _held_salt(self, request: Request) -> str:
        """Return the salt of a running request's keys and values in the cache."""
        return self._salts.get(request.seq_id, request.cache_salt)

    def _preempt(self, request: Request) -> None:
        """Release a request's blocks and queue it again; its tokens are recomputed once it is admitted."""
        self.running.remove(request)
        self._stop(request)
        self.waiting.add(request)
        if not self._has_begun(request):
            self.waiting.end(request)
        request.metrics.num_preemptions += 1
        logger.debug("request %s is preempted after %d tokens", request.request_id, len(request.tokens))

    def _stop(self, request: Request) -> None:
        """Release the blocks of a request, and delete the records that only running requests have."""
        for noted in (self._unstarted, self._salts, self._gained):
            noted.pop(request.seq_id, None)
        self._target.release(request.seq_id)
        self.sources.release(request.seq_id)

    def _turn(self, request: Request) -> Key:
        return self._policy(self._standing(request))

    def _place(self, request: Request) -> tuple[float, ...]:
        """Return the place of a running request in a step: after clients with a lower counter."""
        return self._accounts.of(request.client).counter, *self._turn(request)

    def _rank(self, request: Request) -> tuple[int, int]:
        standing = self._standing(request)
        return standing.level, standing.arrival

    def _last(self) -> Request:
        """Return the running request that is preempted first: of the client with the most, see `last_of`.

        A client's only request comes after those of clients with more. Otherwise one of little weight would take memory
        from such a client (`yields`), and lose it again as soon as texts grow.
        """
        if self._accounts.few:
            return last_of(self.running, self._rank)
        holdings, lasts = self._holdings(), [last_of(each, self._rank) for each in by_client(self.running).values()]

        def excess(request: Request) -> tuple[float, ...]:
            held = holdings[request.client.name]
            return held.num_requests > 1, held.per_weight(), *self._rank(request)

        return max(lasts, key=excess)

    def _standing(self, request: Request) -> Standing:
        held, (queued_at, arrival) = self._target.length(request.seq_id), self._queued_at[request.seq_id]
        backlog = len(request.tokens) - held + self._unencoded(request)
        return Standing(arrival, request.priority, queued_at, held, backlog)

    def _unencoded(self, request: Request) -> int:
        """Return how many tokens of a request's source are not encoded; a waiting request holds no source."""
        if not request.source:
            return 0
        source = self.sources.of(request.seq_id)
        return 0 if source is not None and self.sources.is_encoded(source) else len(request.source)

    def _backlog(self, request: Request) -> int:
        return len(request.tokens) - self._target.length(request.seq_id)


def _width(request: Request) -> int:
    """Return the number of sequences that a request counts as: a beam search has one for each beam."""
    return request.params.beam_width or 1
