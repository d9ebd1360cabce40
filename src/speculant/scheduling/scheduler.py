"""Decides how many tokens of each sequence a step computes.

There is no prefill or decode phase: a step computes tokens that are not in the cache, within the token
budget and the caches' memory. A sequence that lacks only its newest token may also get a draft. The live
hypotheses of a beam search are not a draft: all have to be computed, if necessary over several steps.

    add ---> waiting ---admit---> running ---remove--->
                ^                    |
                +------preempt-------+      out of memory: its blocks are released, its tokens recomputed later

The order in which sequences are served is a policy: a sort key, of which the smallest comes first. A request's *level*
is its priority, and rises by one for every PATIENCE steps that passed before it was queued. So no policy starves a
request: it is served before every request that came PATIENCE steps later with the same priority. A key depends on
nothing that changes while a request waits, so that the queue can be a heap.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from speculant.cache.base import KVCache, ReservationPlan
from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.types import DraftTree, Request

logger = logging.getLogger(__name__)

NO_DRAFT = DraftTree.empty()
MOST_LOGPROB_ROWS = 64  # of a pass over a prompt with log-probabilities, so that new requests do not wait long
PATIENCE = 64  # steps

Key = tuple[int, ...]


@dataclass(slots=True)
class Scheduled:
    """`count` committed tokens of a request that this step computes, from position `start` on.

    tree: the live hypotheses of a beam search that are computed after the newest of them.
    """

    request: Request
    start: int
    count: int
    tree: DraftTree = NO_DRAFT

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


@dataclass(slots=True)
class Schedule:
    """One step's work, and the requests that were admitted and preempted before it.

    `plan` has counted the items' rows in the target's cache, and `spare_tokens` are left of the budget.
    Drafts may use the rest of both.
    """

    items: list[Scheduled]
    plan: ReservationPlan
    spare_tokens: int
    admitted: list[Request]
    preempted: list[Request]

    def one_by_one(self, cache: KVCache) -> Iterator[Schedule]:
        """Yield the same work one sequence at a time; each plan also counts the items that follow."""
        for index, item in enumerate(self.items):
            plan = cache.plan()
            for other in self.items[index:]:
                plan.take(other.request.seq_id, other.num_rows)
            yield replace(self, items=[item], plan=plan)

    def roll_back(self, cache: KVCache) -> None:
        """Drop the positions that a failed step reserved, so that the next step starts where this one did."""
        for item in self.items:
            if cache.length(item.request.seq_id) > item.start:
                cache.truncate_to(item.request.seq_id, item.start)


class Standing(NamedTuple):
    """The facts about a request that a policy may use.

    arrival: number of earlier requests. queued_at: number of steps before it was queued. held: positions in the cache.
    backlog: tokens that are not in the cache.
    """

    arrival: int
    priority: int
    queued_at: int
    held: int
    backlog: int

    @property
    def level(self) -> int:
        """Lower is served sooner."""
        return self.priority + self.queued_at // PATIENCE


def first_come(standing: Standing) -> Key:
    """Serve in order of arrival, prompts and decodes alike."""
    return standing.level, standing.arrival


def decode_first(standing: Standing) -> Key:
    """Serve sequences that lack only their newest token first, so that no prompt delays them; then by arrival.

    A prompt of one token counts as a prompt: otherwise a stream of such prompts would delay all others without bound.
    """
    return int(standing.backlog > 1 or not standing.held), standing.level, standing.arrival


def shortest_prompt(standing: Standing) -> Key:
    """Serve the shortest backlog first."""
    return standing.level, standing.backlog, standing.arrival


Policy = Callable[[Standing], Key]
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"first-come": first_come, "decode-first": decode_first, "shortest-prompt": shortest_prompt}
)


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
        self._queued_at: dict[int, int] = {}
        self._unstarted: dict[int, Request] = {}  # running requests without a scheduled token
        self.waiting = WaitingQueue(self._turn)
        self.running: list[Request] = []

    @property
    def num_vacant(self) -> int:
        """How many more requests can be accepted: max_num_seqs of them may run and max_waiting may wait."""
        return max(0, self._num_places - len(self.running) - len(self.waiting))

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
        """Queue requests together; raises CapacityError if the queue has no places for them."""
        if len(requests) > self.num_vacant:
            raise CapacityError(
                f"{len(self.running)} sequences run and {len(self.waiting)} wait, {len(requests)} more came and "
                f"max_num_seqs + max_waiting is {self._num_places}",
                "try again later, or raise max_waiting.",
            )
        for request in requests:
            self._queued_at[request.seq_id] = self._step
            self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a waiting or running request and release its blocks of the target's cache."""
        (self.running if request in self.running else self.waiting).remove(request)
        del self._queued_at[request.seq_id]
        self._unstarted.pop(request.seq_id, None)
        self._salts.pop(request.seq_id, None)
        self._target.release(request.seq_id)

    def schedule(self) -> Schedule:
        """Admit requests that fit, then share the token budget; preempt the last request while memory is short."""
        self._step += 1
        for request in self.running:  # others may have computed the prefix of one that is not started
            if request.seq_id in self._unstarted or self._held_salt(request) != self._salt(request):
                self._target.release(request.seq_id)
                self._start(request)
        admitted, preempted, plan = self._admit(), list[Request](), self._target.plan()
        while (items := self._share(plan)) is None:
            preempted.append(self._last())
            self._preempt(preempted[-1])
            plan = self._target.plan()
        spare = self._limits.max_num_batched_tokens
        for item in items:
            spare -= item.count + item.tree.size
            self._unstarted.pop(item.request.seq_id, None)
        return Schedule(items, plan, spare, admitted, preempted)

    def _share(self, plan: ReservationPlan) -> list[Scheduled] | None:
        """Share the budget among the running requests, in order; None if one that is not the last finds no memory."""
        budget, items = self._limits.max_num_batched_tokens, list[Scheduled]()
        for request in self.running if len(self.running) == 1 else sorted(self.running, key=self._turn):
            item = self._item(request, budget, plan)
            if item is not None:
                items.append(item)
                budget -= item.count + item.tree.size
            elif self._least(request) <= budget and request is not self._last():
                return None
        return items

    def _item(self, request: Request, budget: int, plan: ReservationPlan) -> Scheduled | None:
        """Take a request's work within budget and room from the plan, and return it if there is any.

        Where no hypothesis fits after it, the newest token is left for a later step.
        """
        start, search = self._target.length(request.seq_id), request.search
        count = len(request.tokens) - start
        if request.params.prompt_logprobs is not None and request.wants_prompt_logits:
            budget = min(budget, MOST_LOGPROB_ROWS)
        if search is None and 0 < count <= budget and plan.take(request.seq_id, count):  # the usual case
            return Scheduled(request, start, count)
        most = min(budget, plan.room(request.seq_id))
        item = Scheduled(request, start, min(count, most))
        if item.completes and search is not None:
            item = replace(item, tree=search.beams.waiting_tree(most - item.count))
            if not item.tree.size and request.num_positions > len(request.tokens):
                item = replace(item, count=item.count - 1)
        plan.take(request.seq_id, item.num_rows)
        return item if item.count else None

    def _least(self, request: Request) -> int:
        """Return the fewest rows that a request can use: its newest token needs one hypothesis after it."""
        return 1 if self._backlog(request) > 1 else 1 + request.num_positions - len(request.tokens)

    def _admit(self) -> list[Request]:
        """Move waiting requests to running while their missing tokens fit; return them."""
        admitted: list[Request] = []
        if not self.waiting:
            return admitted
        self.waiting.readmit(lambda request: not self._waits_for_sibling(request))
        while len(self.running) < self._limits.max_num_seqs and (request := self.waiting.first()) is not None:
            if self._waits_for_sibling(request):
                self.waiting.hold_back(request)
                continue
            self._start(request)
            if self.running and not self._fits(request):
                self._target.release(request.seq_id)
                del self._salts[request.seq_id]
                break
            self.waiting.remove(request)
            self.running.append(request)
            self._unstarted[request.seq_id] = request
            admitted.append(request)
        return admitted

    def _start(self, request: Request) -> None:
        """Take over cached positions: a sibling's prompt, else a matching prefix."""
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
        """Whether the target's cache has room for the missing tokens of the running requests and this one together."""
        plan = self._target.plan()
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
        self._unstarted.pop(request.seq_id, None)
        self._salts.pop(request.seq_id, None)
        self._target.release(request.seq_id)
        self.waiting.add(request)
        request.metrics.num_preemptions += 1
        logger.debug("request %s is preempted after %d tokens", request.request_id, len(request.tokens))

    def _turn(self, request: Request) -> Key:
        return self._policy(self._standing(request))

    def _last(self) -> Request:
        """Return the running request that is preempted first: the last by level, then by arrival."""

        def rank(request: Request) -> tuple[int, int]:
            standing = self._standing(request)
            return standing.level, standing.arrival

        return max(self.running, key=rank)

    def _standing(self, request: Request) -> Standing:
        held = self._target.length(request.seq_id)
        queued_at = self._queued_at[request.seq_id]
        return Standing(request.seq_id, request.priority, queued_at, held, len(request.tokens) - held)

    def _backlog(self, request: Request) -> int:
        return len(request.tokens) - self._target.length(request.seq_id)


class WaitingQueue:
    """A heap of requests; adding, removing and taking the first are O(log n) on average.

    key: orders the requests; it must not change while a request waits. A request that is held back stays in the queue
    and can't be the first until `readmit`.

    The entry of a request that leaves stays in the heap. Each entry has a number of its own, and only the one in
    `_entries` is valid: a request that was removed and added again may have another key. The heap is rebuilt when most
    of its entries are not valid, so its size is proportional to the number of waiting requests.
    """

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._numbers = itertools.count()
        self._heap: list[tuple[Key, int, int]] = []  # key, number of the entry, sequence id
        self._entries: dict[int, int] = {}  # by sequence id: the number of the valid entry
        self._requests: dict[int, Request] = {}
        self._held_back: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._requests.values(), key=self._key))

    def __contains__(self, request: Request) -> bool:
        return request.seq_id in self._requests

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.seq_id] = request
        self._enter(request)

    def remove(self, request: Request) -> None:
        """Take a request out; raises KeyError if it does not wait."""
        del self._requests[request.seq_id]
        if self._held_back.pop(request.seq_id, None) is None:
            self._leave(request)

    def first(self) -> Request | None:
        """Return the first request that is not held back; None if there is none."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][2]] if self._heap else None

    def hold_back(self, request: Request) -> None:
        """Skip a request until it is readmitted."""
        self._held_back[request.seq_id] = request
        self._leave(request)

    def readmit(self, is_ready: Callable[[Request], bool]) -> None:
        """Return the held-back requests that are ready to their places in the queue."""
        for request in [each for each in self._held_back.values() if is_ready(each)]:
            del self._held_back[request.seq_id]
            self._enter(request)

    def check(self) -> None:
        """Assert that each request that can be the first has one valid entry, and that few entries are not valid."""
        valid = [entry[2] for entry in self._heap if self._is_valid(entry)]
        assert sorted([*valid, *self._held_back]) == sorted(self._requests), "a waiting request has no entry, or two"
        assert len(self._heap) <= 2 * len(self._entries), "the heap keeps entries of requests that left it"

    def _enter(self, request: Request) -> None:
        number = self._entries[request.seq_id] = next(self._numbers)
        heapq.heappush(self._heap, (self._key(request), number, request.seq_id))

    def _leave(self, request: Request) -> None:
        """Make a request's entry invalid."""
        del self._entries[request.seq_id]
        if len(self._heap) > 2 * len(self._entries):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[Key, int, int]) -> bool:
        _, number, seq_id = entry
        return self._entries.get(seq_id) == number
