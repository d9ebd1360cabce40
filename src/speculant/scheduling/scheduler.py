"""Which sequences feed how many tokens in a step.

There is no prefill and no decode: a sequence feeds what its cache has not seen, as far as the token
budget and the caches' memory go. One that is caught up but for its newest token may also carry a draft.
The live hypotheses of a beam search are no draft: they have to be fed, if need be some of them at a time.

    add ---> waiting ---admit---> running ---remove--->
                ^                    |
                +------preempt-------+      out of memory: all is released, and fed again later
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from speculant.cache.base import KVCache, ReservationPlan
from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.scheduling.policy import POLICIES, Key, Standing
from speculant.scheduling.waiting import WaitingQueue
from speculant.types import DraftTree, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scheduled:
    """`count` committed tokens of a request that this step feeds, from position `start` on.

    tree: what has to be fed behind the newest of them, the live hypotheses of a beam search.
    """

    request: Request
    start: int
    count: int
    tree: DraftTree = field(default_factory=DraftTree.empty)

    @property
    def num_rows(self) -> int:
        """What all this takes of the budget and of the cache."""
        return self.count + self.tree.size

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed."""
        return self.request.tokens[self.start : self.start + self.count]

    @property
    def completes(self) -> bool:
        """Whether the newest token is among them, so that a next one can be chosen."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether only the newest token was missing, so that a draft may follow it and all live hypotheses."""
        search = self.request.search
        return self.completes and self.count == 1 and (search is None or search.beams.completed_by(self.tree))


@dataclass(frozen=True)
class Schedule:
    """One step's work: who feeds what, who came and who was set aside before it.

    `plan` has counted the items' rows in the target's cache and `spare_tokens` are left of the
    budget: what is left of both, drafts may use.
    """

    items: list[Scheduled]
    plan: ReservationPlan
    spare_tokens: int
    admitted: list[Request]
    preempted: list[Request]

    def one_by_one(self, cache: KVCache) -> Iterator[Schedule]:
        """Yield the same work a sequence at a time; each plan counts those that are still to come."""
        for place, item in enumerate(self.items):
            plan = cache.plan()
            for other in self.items[place:]:
                plan.take(other.request.seq_id, other.num_rows)
            yield replace(self, items=[item], plan=plan)


class Scheduler:
    """Keeps the waiting and the running requests. `target` is the target's cache: it alone decides who is admitted.

    Drafters have caches of their own and draft for the requests that find room there. Those that keep states per
    sequence bound what a request may take over from the prefix index: `most_matched` returns that many positions.
    """

    def __init__(
        self,
        limits: Limits,
        target: KVCache,
        most_matched: Callable[[Request], int],
    ) -> None:
        self._limits, self._target, self._most_matched = limits, target, most_matched
        self._policy = POLICIES[limits.scheduling_policy]
        self._step = 0
        self._queued_at: dict[int, int] = {}
        self._unfed: dict[int, Request] = {}  # running, but nothing was fed for them yet
        self.waiting = WaitingQueue(self._turn)
        self.running: list[Request] = []

    @property
    def num_vacant(self) -> int:
        """How many more requests may wait."""
        return max(0, self._limits.max_waiting - len(self.waiting))

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests together; CapacityError if the queue is too full for them."""
        if len(requests) > self.num_vacant:
            raise CapacityError(
                f"{len(self.waiting)} sequences are waiting, {len(requests)} more came and max_waiting is "
                f"{self._limits.max_waiting}",
                "try again later, or raise max_waiting.",
            )
        for request in requests:
            self._queued_at[request.seq_id] = self._step
            self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and release what it holds of the target's cache."""
        (self.running if request in self.running else self.waiting).remove(request)
        del self._queued_at[request.seq_id]
        self._unfed.pop(request.seq_id, None)
        self._target.release(request.seq_id)

    def schedule(self) -> Schedule:
        """Admit who fits, then share the token budget; whoever stands last makes room if the memory is too small."""
        self._step += 1
        for request in self._unfed.values():  # what they begin with may have been fed for others meanwhile
            self._target.release(request.seq_id)
            self._start(request)
        admitted, preempted = self._admit(), list[Request]()
        while True:
            plan = self._target.plan()
            last = max(self.running, key=self._rank, default=None)
            items = self._share(plan, last)
            if items is not None or last is None:
                for item in items or ():
                    self._unfed.pop(item.request.seq_id, None)
                spare = self._limits.max_num_batched_tokens - sum(item.num_rows for item in items or ())
                return Schedule(items or [], plan, spare, admitted, preempted)
            self._preempt(last)
            preempted.append(last)

    def _share(self, plan: ReservationPlan, last: Request | None) -> list[Scheduled] | None:
        """Give each in its turn what it can use of the budget; None if somebody before the last finds no memory."""
        budget, items = self._limits.max_num_batched_tokens, list[Scheduled]()
        for request in sorted(self.running, key=self._turn):
            item = self._feed(request, min(budget, plan.room(request.seq_id)))
            if item is not None:
                plan.take(request.seq_id, item.num_rows)
                items.append(item)
                budget -= item.num_rows
            elif request is not last and self._least(request) <= budget:
                return None
        return items

    def _feed(self, request: Request, most: int) -> Scheduled | None:
        """Return what a request feeds of `most` rows, if anything.

        Where not one hypothesis finds room behind it, the newest token waits for a pass that has some.
        """
        item = Scheduled(request, self._target.length(request.seq_id), min(self._backlog(request), most))
        if item.completes and request.search is not None:
            item = replace(item, tree=request.search.beams.waiting_tree(most - item.count))
            if not item.tree.size and request.num_positions > len(request.tokens):
                item = replace(item, count=item.count - 1)
        return item if item.count else None

    def _least(self, request: Request) -> int:
        """Return with how few rows a request gets on: the newest token takes one hypothesis with it."""
        return 1 if self._backlog(request) > 1 else 1 + request.num_positions - len(request.tokens)

    def _admit(self) -> list[Request]:
        """Move waiting requests to running while there is room for what they have to feed; return them."""
        admitted: list[Request] = []
        self.waiting.readmit(lambda request: not self._waits_for_sibling(request))
        while len(self.running) < self._limits.max_num_seqs and (request := self.waiting.first()) is not None:
            if self._waits_for_sibling(request):
                self.waiting.hold_back(request)
                continue
            self._start(request)
            if self.running and not self._fits(request):
                self._target.release(request.seq_id)
                break
            self.waiting.remove(request)
            self.running.append(request)
            self._unfed[request.seq_id] = request
            admitted.append(request)
        return admitted

    def _start(self, request: Request) -> None:
        """Take over what is known of the tokens: a sibling's prompt, else a prefix that was fed before."""
        sibling = next(
            (r for r in self._siblings(request) if self._target.length(r.seq_id) >= len(request.prompt)), None
        )
        most = min(self._most_matched(request), len(request.tokens) - 1)
        if sibling is not None and not request.num_output:
            self._target.fork(sibling.seq_id, request.seq_id)
            self._target.truncate_to(request.seq_id, min(most, len(request.prompt) - 1))
        else:
            limit = 0 if request.wants_prompt_logits else most
            self._target.match_prefix(request.seq_id, request.tokens, request.cache_salt, limit)
        if not request.metrics.num_preemptions:
            request.metrics.cached_tokens = self._target.length(request.seq_id)

    def _fits(self, request: Request) -> bool:
        """Whether the target's cache can hold what the running requests and this one have to feed, all at once."""
        plan = self._target.plan()
        for other in self.running:
            behind = other.num_positions - self._target.length(other.seq_id)
            plan.take(other.seq_id, min(plan.room(other.seq_id), behind))
        return plan.room(request.seq_id) >= request.num_positions - self._target.length(request.seq_id)

    def _waits_for_sibling(self, request: Request) -> bool:
        """Whether a sibling still feeds their common prompt: the others start from its cache."""
        siblings = self._siblings(request)
        return bool(siblings) and all(self._target.length(other.seq_id) < len(request.prompt) for other in siblings)

    def _siblings(self, request: Request) -> list[Request]:
        return [other for other in self.running if other.request_id == request.request_id]

    def _preempt(self, request: Request) -> None:
        """Set a request aside; when it comes back it feeds its tokens again (recompute)."""
        self.running.remove(request)
        self._unfed.pop(request.seq_id, None)
        self._target.release(request.seq_id)
        self.waiting.add(request)
        request.metrics.num_preemptions += 1
        logger.debug("request %s is preempted after %d tokens", request.request_id, len(request.tokens))

    def _turn(self, request: Request) -> Key:
        return self._policy(self._standing(request))

    def _rank(self, request: Request) -> tuple[int, int]:
        """Who is set aside when memory is short: the last by level, then by arrival."""
        standing = self._standing(request)
        return standing.level, standing.arrival

    def _standing(self, request: Request) -> Standing:
        held = self._target.length(request.seq_id)
        queued_at = self._queued_at[request.seq_id]
        return Standing(request.seq_id, request.priority, queued_at, held, len(request.tokens) - held)

    def _backlog(self, request: Request) -> int:
        return len(request.tokens) - self._target.length(request.seq_id)
