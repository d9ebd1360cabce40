"""A long prompt that a drafter has not seen: drafting begins only if it saves more than the prompt takes."""

from __future__ import annotations

import pytest

from speculant.params import SamplingParams
from speculant.scheduling.costs import CostCurve, StepCosts
from speculant.scheduling.draft_length.adaptive import Adaptive
from speculant.scheduling.draft_length.backlog import Backlogs
from speculant.scheduling.scheduler import Schedule, Scheduled
from speculant.types import Request
from tests.models import make_request

PASSES = CostCurve({1: 1.0, 64: 6.4})  # a row of many takes a tenth of a pass
DRAFTS = {"some": {1: CostCurve({1: 0.1, 8: 0.8})}}


def costs() -> StepCosts:
    return StepCosts(PASSES, DRAFTS)


def request_of(prompt: int, max_tokens: int | None) -> Request:
    request = make_request([1] * prompt, params=SamplingParams(max_tokens=max_tokens))
    request.drafter = "some"
    return request


def chosen(policy: Adaptive, *requests: Request) -> list[int]:
    items = [Scheduled(request, len(request.tokens) - 1, 1) for request in requests]
    return policy.choose(Schedule(items, None, 10**6, [], []))  # type: ignore[arg-type]


def test_a_backlog_takes_a_drafters_pass_for_its_rows() -> None:
    backlogs, request = Backlogs(costs(), lambda method: True), request_of(1000, 10)
    assert backlogs.seconds("some", request) == pytest.approx(1000 * 0.1 * 6.4 / 64)
    backlogs.note(request)
    assert backlogs.seconds("some", request) == 0.0
    assert Backlogs(costs(), lambda method: False).seconds("some", request_of(1000, 10)) == 0.0


@pytest.mark.parametrize(("prompt", "max_tokens", "drafts"), [
    (100, 50, True), (4000, 50, False), (4000, 1000, True), (4000, None, True),
])  # fmt: skip
def test_drafting_begins_if_the_answer_is_long_enough(prompt: int, max_tokens: int | None, drafts: bool) -> None:
    policy = Adaptive(None, costs(), has_cache=lambda method: True)
    assert any(chosen(policy, request_of(prompt, max_tokens))) is drafts
    assert any(chosen(Adaptive(None, costs()), request_of(prompt, max_tokens)))  # without a cache nothing is missing


def test_a_long_prompt_keeps_no_neighbour_from_drafting() -> None:
    policy = Adaptive(None, costs(), has_cache=lambda method: True)
    short, long = chosen(policy, request_of(20, 50), request_of(4000, 50))
    assert short
    assert not long


def test_a_request_that_was_drafted_for_goes_on() -> None:
    policy, request = Adaptive(None, costs(), has_cache=lambda method: True), request_of(4000, 50)
    policy._backlogs.note(request)
    assert any(chosen(policy, request))
