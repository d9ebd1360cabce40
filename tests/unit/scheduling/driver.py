"""A scheduler over real caches whose steps compute and commit tokens without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduler
from speculant.types import ANYONE, NO_WORK, Client, Ending, Request, StepWork
from tests.models import make_request

SHAPE = CacheShape(1, 1, 1, torch.float32, torch.device("cpu"))
BLOCK = 4


def slots(num_slots: int, max_len: int = 100) -> KVCache:
    return slotted_cache(SHAPE, num_slots, max_len)


def blocks(num_blocks: int, keep_prefixes: bool = False) -> KVCache:
    return paged_cache(SHAPE, num_blocks, BLOCK, keep_prefixes)


class Driver:
    """Adds requests and treats each schedule as a step does; each new token is a 7."""

    def __init__(
        self,
        cache: KVCache,
        max_num_seqs: int = 4,
        budget: int = 100,
        policy: str = "decode-first",
        max_waiting: int = 1024,
    ) -> None:
        self.cache = cache
        self.limits = Limits(100, max_num_seqs, budget, max_waiting, policy)
        self.scheduler = Scheduler(self.limits, cache, lambda request: len(request.tokens))
        self.requests: list[Request] = []
        self.started: list[Request] = []  # whenever they were admitted

    def add(
        self,
        num_prompt: int,
        max_tokens: int = 3,
        request_id: str | None = None,
        token: int | None = None,
        priority: int = 0,
        params: SamplingParams | None = None,
        client: Client = ANYONE,
        source: Sequence[int] = (),
        work: StepWork = NO_WORK,
    ) -> Request:
        """Queue a request; its prompt repeats one token, by default one that no other has."""
        seq_id = len(self.requests)
        request = make_request(
            [100 + seq_id if token is None else token] * num_prompt,
            params=params or SamplingParams(max_tokens=max_tokens),
            seq_id=seq_id,
            request_id=request_id or f"request-{seq_id}",
            priority=priority,
            client=client,
            source=tuple(source),
            work=work,
        )
        self.scheduler.add([request])
        self.requests.append(request)
        return request

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests, in their order."""
        return list(self.scheduler.waiting)

    def start_all(self) -> None:
        """Let everybody run, as if all had been admitted."""
        self.scheduler.running[:] = self.requests
        for request in self.requests:
            self.scheduler.waiting.remove(request)

    def step(self) -> Schedule:
        """Schedule, compute all items, and commit a token wherever no token is missing."""
        schedule = self.scheduler.schedule()
        self.started += schedule.admitted
        for source, _ in schedule.sources:
            assert self.cache.reserve(source.seq_id, len(source.tokens)).start == 0, "a source is encoded twice"
        for item in schedule.items:
            slots = self.cache.reserve(item.request.seq_id, item.count)
            assert slots.start == item.start, "something is skipped or fed twice"
            assert item.source is None or self.scheduler.sources.is_encoded(item.source), "a source is not encoded"
        for item in schedule.items:
            if item.completes:
                item.request.tokens.append(7)
            self.cache.insert_prefix(item.request.seq_id, item.request.tokens)
            if item.request.num_output == item.request.params.max_tokens:
                item.request.ending = Ending("length")
                self.scheduler.remove(item.request)
        self.check()
        return schedule

    def check(self) -> None:
        """Assert that waiting requests own no blocks."""
        self.cache.check()
        self.scheduler.sources.check()
        assert all(self.cache.length(request.seq_id) == 0 for request in self.scheduler.waiting)

    def steps_until(self, done: Callable[[], bool], most: int = 1000) -> int:
        """Step until something is so; return how many steps that took."""
        for count in range(most):
            if done():
                return count
            self.step()
        raise AssertionError(f"it is not so after {most} steps")

    def finish(self) -> None:
        """Step until no request waits or runs."""
        self.steps_until(lambda: not (self.scheduler.waiting or self.scheduler.running))


def counts(schedule: Schedule) -> dict[int, int]:
    """Return how many tokens of each sequence are computed, in their order."""
    return {item.request.seq_id: item.count for item in schedule.items}
