"""Decides how many tokens of each sequence a step computes.

There is no prefill or decode phase: a step computes tokens that are not in the cache, within the token
budget and the caches' memory. A sequence that lacks only its newest token may also get a draft. The live
hypotheses of a beam search are not a draft: all have to be computed, if necessary over several steps.

    add ---> waiting ---admit---> running ---remove--->
                ^                    |
                +------preempt-------+      for memory, or for a client without a place: its blocks are released, and
                                            its tokens recomputed later

Places and rows are divided among clients, and a client's among its requests, which a policy orders
(scheduling/order.py). The rows of a step are divided in scheduling/schedule.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from speculant.cache import KVCache
from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.scheduling.order import (
    TURN,
    Holding,
    Key,
    Standings,
    WaitingRequests,
    by_client,
    last_of,
    surplus,
    width,
    yields,
)
from speculant.scheduling.schedule import Encoding, RowDivision, Schedule, Scheduled
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
        self._salts: dict[int, str] = {}  # of the keys and values that running requests have in the cache
        self._step = 0
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
        if len(requests) > self.num_vacant(requests[0].client):
            raise CapacityError(
                f"{len(self.running)} sequences run and {len(self.waiting)} wait, {len(requests)} more came and "
                f"max_num_seqs + max_waiting is {self._num_places}, shared by the clients",
                "try again later, or raise max_waiting.",
            )
        for request in requests:
            self._accounts.enter(request.client)
            self.standings.queue(request, self._step)
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
            if not self.standings.has_begun(request):
                for sibling in self.waiting.siblings(request):
                    self.standings.queue(sibling, self._step)
                self.waiting.end(request)
        self.standings.forget(request)
        self._accounts.leave(request.client)
        self._stop(request)

    def schedule(self) -> Schedule:
        """Admit requests that fit, then share the token budget; preempt the last request while memory is short."""
        self._step += 1
        for request in self.running:  # others may have computed the prefix of one that is not started
            salt = self._salts.get(request.seq_id, request.cache_salt)
            if salt != self._salt(request) or request.seq_id in self._unstarted:
                self._target.release(request.seq_id)
                self._start(request)
        admitted, preempted = self._admit() if self.waiting else ([], [])
        plan, waited = self._target.plan(), self._division.late
        while (divided := self._division.divide(plan, waited)) is None:
            preempted.append(self.standings.last())
            self._preempt(preempted[-1])
            plan = self._target.plan()
        (items, sources, work), spare = divided, self._limits.max_num_batched_tokens
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
            return request.priority, running[request.call], self.standings.turn(request)

        for request in [*self.waiting.firsts_of_begun(is_ready), *self.waiting.firsts_of_others()]:
            other = firsts.setdefault(request.client.name, request)
            firsts[request.client.name] = request if other is request else min(other, request, key=turn)
        if len(firsts) < 2:
            return [*firsts.values()]
        holdings = self.standings.holdings()

        def claim(request: Request) -> tuple[float, float, int]:
            holding = holdings.get(request.client.name) or Holding(self._accounts.of(request.client))
            return holding.per_weight(), holding.account.counter, request.seq_id

        return sorted(firsts.values(), key=claim)

    def _exchange(self, preempted: list[Request]) -> Request | None:
        """Start a request of which nothing runs in the place of a surplus one of its client, and return it."""
        running = by_client(self.running)
        for claimant in self.waiting.firsts_of_others():
            own = running.get(claimant.client.name, [])
            while (extra := surplus(own, claimant.priority, self.standings.rank)) is not None:
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
        own = holdings.pop(claimant.client.name, None) or Holding(self._accounts.of(claimant.client))
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
        return [other for other in siblings if self._salts.get(other.seq_id, other.cache_salt) == salt]

    def _preempt(self, request: Request) -> None:
        """Release a request's blocks and queue it again; its tokens are recomputed once it is admitted."""
        self.running.remove(request)
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
