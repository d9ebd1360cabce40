"""A long prompt that a drafter has not seen: drafting begins only if it saves more than the prompt takes."""

from __future__ import annotations

import math

import pytest

from speculant.drafting import DrafterNeeds
from speculant.lengths import Adaptive, Backlogs, CostCurve, DraftOutcome, Reading, ScoredDraft, StepCosts
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduled
from speculant.types import DraftRules, Request
from tests.models import make_request

TIMING = StepTiming(0.0, 0.1, 1.1, 0.1)
PASSES = CostCurve({1: 1.0, 64: 6.4})
READING = Reading(0.008, 1e-6)
DRAFTS = {"some": {1: CostCurve({1: 0.1, 8: 0.8})}}


def costs() -> StepCosts:
    return StepCosts(PASSES, DRAFTS, readings={"some": READING})


def request_of(prompt: int, max_tokens: int | None) -> Request:
    request = make_request([1] * prompt, params=SamplingParams(max_tokens=max_tokens))
    request.drafts = DraftRules("some")
    return request


def chosen(policy: Adaptive, *requests: Request) -> list[int]:
    items = [Scheduled(request, len(request.tokens) - 1, 1) for request in requests]
    return policy.choose(Schedule(items, None, 10**6, [], []))  # type: ignore[arg-type]


def test_a_backlog_takes_the_measured_time() -> None:
    backlogs, request = Backlogs(costs()), request_of(1000, 10)
    assert backlogs.seconds("some", request) == pytest.approx(1000 * 0.008 + 1000 * 500 * 1e-6)
    assert backlogs.seconds("another", request) == 0.0
    backlogs.note(request)
    assert backlogs.seconds("some", request) == 0.0
    request.tokens.extend([1] * 100)
    assert backlogs.seconds("some", request) == pytest.approx(100 * 0.008 + 100 * 1050 * 1e-6)


def test_readings_that_are_measured_later_count() -> None:
    later = StepCosts(PASSES, DRAFTS)
    backlogs, request = Backlogs(later), request_of(1000, 10)
    assert backlogs.seconds("some", request) == 0.0
    later.readings = {"some": READING}
    assert backlogs.seconds("some", request) > 0.0


def test_a_source_is_read_once() -> None:
    backlogs = Backlogs(costs())
    request = make_request([1] * 2, params=SamplingParams(max_tokens=50), source=(1,) * 98)
    assert backlogs.seconds("some", request) == pytest.approx(100 * 0.008 + 100 * 50 * 1e-6)
    assert backlogs.note(request) == 100
    assert backlogs.seconds("some", request) == 0.0
    request.tokens.extend([1] * 10)
    assert backlogs.note(request) == 10


@pytest.mark.parametrize(("prompt", "max_tokens", "drafts"), [
    (100, 50, True), (4000, 50, False), (4000, 1000, True), (4000, None, True), (40_000, None, False),
])  # fmt: skip
def test_drafting_begins_if_the_answer_is_long_enough(prompt: int, max_tokens: int | None, drafts: bool) -> None:
    assert any(chosen(Adaptive(None, costs()), request_of(prompt, max_tokens))) is drafts
    without_cache = StepCosts(PASSES, DRAFTS)
    assert any(chosen(Adaptive(None, without_cache), request_of(prompt, max_tokens)))


def test_a_long_prompt_keeps_no_neighbour_from_drafting() -> None:
    policy = Adaptive(None, costs())
    short, long = chosen(policy, request_of(20, 50), request_of(4000, 50))
    assert short
    assert not long


@pytest.mark.parametrize(("most_s", "counts", "read"), [(math.inf, [2, 2, 0], 3000), (10.0, [0, 2, 0], 1000)])
def test_of_backlogs_that_take_too_long_the_shortest_stays(most_s: float, counts: list[int], read: int) -> None:
    backlogs = Backlogs(StepCosts(PASSES, DRAFTS, readings={"some": Reading(0.01, 0.0)}))
    requests = [request_of(prompt, None) for prompt in (2000, 1000, 500)]
    kept, seconds = backlogs.affordable("some", requests, [2, 2, 0], 1.0, most_s)
    assert (kept, seconds) == (counts, pytest.approx(0.01 * read))


def test_a_draft_that_was_looked_up_reads_nothing() -> None:
    """A method may look drafts up first and ask a model then: only the model's drafts show that it has read a text."""
    policy, request = Adaptive(None, costs(), lambda method: DrafterNeeds(selects=True)), request_of(4000, 50)
    chosen(policy, request)
    assert policy.trim([ScoredDraft(request, [0.9], [-1])]) == [1]
    policy.observe([DraftOutcome(request, [1], [1], [1], (0,))], TIMING)
    assert policy._backlogs.seconds("some", request) > 0
    chosen(policy, request_of(20, 50))
    policy.observe([DraftOutcome(request, [1], [1], [1], (0,))], TIMING)
    assert policy._backlogs.seconds("some", request) == 0


def test_a_backlog_is_not_read_for_tokens_that_are_looked_up() -> None:
    policy = Adaptive(None, costs(), lambda method: DrafterNeeds(selects=True))
    before = request_of(4000, 200)
    chosen(policy, before)
    assert policy.longest_unscored(before)
    for _ in range(60):
        chosen(policy, request := request_of(20, 50))
        policy.trim([ScoredDraft(request, [0.9] * 8, range(-1, 7))])
        policy.observe([DraftOutcome(request, [1] * 8, [1] * 8, [1] * 8, tuple(range(8)))], TIMING)
    chosen(policy, after := request_of(4000, 200))
    assert not policy.longest_unscored(after)


def test_a_request_with_drafts_keeps_them() -> None:
    policy, request = Adaptive(None, costs()), request_of(4000, 50)
    policy._backlogs.note(request)
    assert any(chosen(policy, request))


@pytest.mark.parametrize(("late", "draft_s", "change"), [
    (True, 0.4, 0), (True, 0.01, 0), (False, 0.4, 1), (False, 0.01, -1),
])  # fmt: skip
def test_a_late_draft_does_not_change_the_cost_of_drafts(late: bool, draft_s: float, change: int) -> None:
    """One that processes many tokens first shows little about the next one."""
    own = StepCosts(CostCurve({1: 1.0, 64: 6.4}), {"some": {1: CostCurve({1: 0.1, 8: 0.8})}})
    policy, request = Adaptive(None, own), request_of(100, 50)
    if not late:
        policy._backlogs.note(request)
    before = own.draft_s("some", 1, 1)
    chosen(policy, request)
    policy.observe([DraftOutcome(request, [1], [1], [1], (0,))], StepTiming(0.0, draft_s, draft_s + 1.0))
    after = own.draft_s("some", 1, 1)
    assert (after > before) - (after < before) == change
