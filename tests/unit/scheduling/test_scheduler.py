"""Who feeds how much: the budget holds, decoders come first, nobody starves, samples wait for their first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculant.config import Limits
from speculant.params import SamplingParams
from speculant.scheduling.scheduler import Scheduled, Scheduler
from speculant.types import Request
from tests.models import make_request


@dataclass
class Lengths:
    """A cache as far as a scheduler looks at it."""

    held: dict[int, int] = field(default_factory=dict)

    def length(self, seq: int) -> int:
        return self.held.get(seq, 0)


def request_of(seq: int, num_prompt: int, request_id: str | None = None, max_tokens: int = 3) -> Request:
    return make_request(
        [1] * num_prompt, params=SamplingParams(max_tokens=max_tokens), seq=seq, request_id=request_id or f"r{seq}"
    )


def scheduler_of(requests: list[Request], max_num_seqs: int = 4, budget: int = 8) -> Scheduler:
    scheduler = Scheduler(Limits(100, max_num_seqs, budget))
    for request in requests:
        scheduler.add(request)
    return scheduler


def counts(scheduled: list[Scheduled]) -> dict[int, int]:
    return {item.request.seq: item.count for item in scheduled}


def feed(scheduler: Scheduler, cache: Lengths, scheduled: list[Scheduled]) -> list[Request]:
    """Do what a step does with the schedule; return the requests that gained a token."""
    grown = []
    for item in scheduled:
        cache.held[item.request.seq] = item.start + item.count
        if item.completes:
            item.request.tokens.append(2)
            grown.append(item.request)
        if item.request.num_output == item.request.params.max_tokens:
            scheduler.remove(item.request)
    return grown


@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    max_num_seqs=st.integers(1, 5),
    extra=st.integers(0, 10),
)
def test_every_request_is_served_within_the_budget(prompts: list[int], max_num_seqs: int, extra: int) -> None:
    budget, cache = max_num_seqs + extra, Lengths()
    requests = [request_of(seq, length) for seq, length in enumerate(prompts)]
    scheduler = scheduler_of(requests, max_num_seqs, budget)
    fed_prompt = [0] * len(requests)
    for _ in range(sum(prompts) + 3 * len(prompts) + 1):
        scheduler.admit(cache)
        if not scheduler.running:
            break
        scheduled = scheduler.schedule(cache)
        assert scheduled, "a step that does nothing"
        assert len(scheduler.running) <= max_num_seqs
        assert sum(item.count for item in scheduled) <= budget
        assert scheduler.draft_budget(scheduled) == budget - sum(item.count for item in scheduled)
        for item in scheduled:
            assert item.count >= 1
            assert item.start == cache.length(item.request.seq), "nothing is skipped or fed twice"
            assert item.start + item.count <= len(item.request.tokens)
            fed_prompt[item.request.seq] += item.count if item.start < len(item.request.prompt) else 0
        decoding = {r.seq for r in scheduler.running if len(r.tokens) - cache.length(r.seq) == 1}
        assert decoding <= set(counts(scheduled)), "who is caught up is never left out"
        feed(scheduler, cache, scheduled)
    assert [request.num_output for request in requests] == [3] * len(requests)
    assert fed_prompt == prompts


def test_long_prompts_are_fed_in_chunks() -> None:
    cache = Lengths()
    scheduler = scheduler_of([request_of(1, 20)], budget=8)
    scheduler.admit(cache)
    chunks = []
    for _ in range(4):
        scheduled = scheduler.schedule(cache)
        chunks += [(item.start, item.count, item.completes, item.decodes) for item in scheduled]
        feed(scheduler, cache, scheduled)
    assert chunks == [(0, 8, False, False), (8, 8, False, False), (16, 4, True, False), (20, 1, True, True)]


def test_decoders_come_before_a_prompt_that_came_earlier() -> None:
    cache = Lengths({2: 5, 3: 5})
    requests = [request_of(1, 30), request_of(2, 6), request_of(3, 6)]
    scheduler = scheduler_of(requests, budget=5)
    scheduler.admit(cache)
    assert counts(scheduler.schedule(cache)) == {1: 3, 2: 1, 3: 1}


def test_prompts_share_what_is_left_in_the_order_they_came() -> None:
    cache = Lengths({3: 5})
    scheduler = scheduler_of([request_of(1, 3), request_of(2, 30), request_of(3, 6), request_of(4, 30)], budget=8)
    scheduler.admit(cache)
    assert counts(scheduler.schedule(cache)) == {1: 3, 2: 4, 3: 1}


def test_the_tokens_to_feed_are_those_the_cache_has_not_seen() -> None:
    request = make_request([10, 11, 12, 13], [20])
    assert Scheduled(request, 1, 2).tokens == [11, 12]
    assert not Scheduled(request, 1, 2).completes
    assert Scheduled(request, 3, 2).tokens == [13, 20]
    assert Scheduled(request, 3, 2).completes
    assert not Scheduled(request, 3, 2).decodes
    assert Scheduled(request, 4, 1).decodes


def test_waiting_requests_start_in_order_when_there_is_room() -> None:
    cache, requests = Lengths(), [request_of(seq, 2) for seq in range(5)]
    scheduler = scheduler_of(requests, max_num_seqs=2)
    assert scheduler.admit(cache) == requests[:2]
    assert scheduler.admit(cache) == []
    scheduler.remove(requests[0])
    assert scheduler.admit(cache) == requests[2:3]
    assert scheduler.running == requests[1:3]
    assert list(scheduler.waiting) == requests[3:]


def test_a_request_can_leave_from_anywhere() -> None:
    cache, requests = Lengths(), [request_of(seq, 2) for seq in range(3)]
    scheduler = scheduler_of(requests, max_num_seqs=1)
    scheduler.admit(cache)
    scheduler.remove(requests[1])
    assert list(scheduler.waiting) == requests[2:]
    scheduler.remove(requests[0])
    assert scheduler.running == []
    with pytest.raises(ValueError, match="not in"):
        scheduler.remove(requests[0])


def test_samples_of_one_prompt_wait_until_the_first_has_fed_it() -> None:
    cache = Lengths()
    samples = [request_of(seq, 10, "same") for seq in range(3)]
    scheduler = scheduler_of(samples, budget=6)
    assert scheduler.admit(cache) == samples[:1]
    feed(scheduler, cache, scheduler.schedule(cache))
    assert scheduler.admit(cache) == []
    feed(scheduler, cache, scheduler.schedule(cache))
    assert cache.length(0) == 10
    assert scheduler.admit(cache) == samples[1:], "all others at once, although they hold nothing yet"


def test_the_same_prompt_under_another_name_does_not_wait() -> None:
    requests = [request_of(1, 10), request_of(2, 10)]
    scheduler = scheduler_of(requests)
    assert scheduler.admit(Lengths()) == requests
