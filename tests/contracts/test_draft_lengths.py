"""Every draft-length policy, found by its file, and the engine's promises to a policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from speculant import plugins
from speculant.config import Limits
from speculant.errors import ConfigError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.lengths import DraftLength, DraftLengthContext, DraftOutcome, completed
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.scheduling import Schedule
from tests.fakes import Rig, build_rig, model_drafter
from tests.unit.scheduling.driver import Driver, slots

KIND = "speculant.lengths"
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=96)
PAIR = Pair(5, 5, FULL_SUPPORT)
DOCUMENTED = "halving"  # the one in docs/adding-a-draft-length.md


@pytest.fixture(params=[*plugins.names(KIND), DOCUMENTED])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == DOCUMENTED:
        request.getfixturevalue("documented_length")
    return str(request.param)


def build(name: str, length: int = 3) -> DraftLength:
    policy: DraftLength = plugins.load(KIND, name).build(DraftLengthContext(length))
    return policy


def test_policy_chooses_a_length_for_every_item(name: str) -> None:
    driver = Driver(slots(4))
    for length in (3, 5, 2):
        driver.add(length)
    schedule, policy = driver.step(), build(name)
    lengths = policy.choose(schedule)
    assert len(lengths) == len(schedule.items)
    assert all(isinstance(length, int) and length >= 0 for length in lengths)
    outcomes = [DraftOutcome(schedule.items[0].request, [1, 1], [1, 0], [0, 0])]
    policy.observe(outcomes, StepTiming(0.0, 0.1, 0.3))
    assert len(policy.choose(schedule)) == len(schedule.items)


def test_policy_refuses_unknown_options(name: str) -> None:
    with pytest.raises(ConfigError, match="wndow"):
        plugins.load(KIND, name).build(DraftLengthContext(3, {"wndow": 1}))


class Recorded(DraftLength):
    """Chooses the scripted length for a whole batch, and keeps the outcomes that it observes."""

    def __init__(self, script: Sequence[int], keeps_up: bool = False) -> None:
        self.keeps_up, self._script = keeps_up, script
        self.outcomes: list[DraftOutcome] = []
        self.timings: list[StepTiming] = []
        self.batches: list[int] = []

    def choose(self, schedule: Schedule) -> list[int]:
        wanted = self._script[len(self.batches) % len(self._script)]
        self.batches.append(len(schedule.items))
        return [wanted + place for place in range(len(schedule.items))] if wanted else [0] * len(schedule.items)

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        self.outcomes += outcomes
        self.timings.append(timing)


def run(policy: DraftLength, temperature: float = 1.0) -> Rig:
    drafter = model_drafter(TableModel(PAIR.draft, 5), 5, limits=LIMITS)
    rig = build_rig(TableModel(PAIR.target, 5), drafter, limits=LIMITS, draft_length=policy)
    for prompt in ((0, 1), (2,), (3, 1, 4)):
        rig.add(prompt, SamplingParams(temperature=temperature, max_tokens=24), str(prompt))
    return rig


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_policy_observes_drafted_tested_and_accepted_tokens(temperature: float) -> None:
    policy = Recorded([2, 0, 4])
    rig = run(policy, temperature)
    requests = list(rig.requests)
    rig.finish()
    for request in requests:
        own, metrics = (
            [each for each in policy.outcomes if each.request is request],
            request.metrics.speculative_decoding,
        )
        assert len(own) == metrics.num_spec_steps > 0
        assert sum(sum(each.drafted) for each in own) == metrics.num_draft_tokens
        assert sum(sum(each.accepted) for each in own) == metrics.num_accepted_draft_tokens
        assert sum(sum(each.tested) for each in own) == metrics.num_tested_tokens
        for each in own:
            assert len(each.drafted) == len(each.tested) == len(each.accepted)
            assert list(each.tested) == sorted(each.tested, reverse=True)
            assert all(accepted <= tested for accepted, tested in zip(each.accepted, each.tested, strict=True))
    assert len(policy.timings) == rig.engine.metrics.steps
    assert all(timing.draft_s >= 0 and timing.verify_s > 0 for timing in policy.timings)


def test_policy_that_keeps_up_leaves_no_backlog() -> None:
    """Six steps without a draft: the drafter's cache holds the tokens all the same."""
    held = {}
    for keeps_up in (False, True):
        rig = run(Recorded([0, 0, 0, 0, 0, 0, 3], keeps_up))
        requests = list(rig.requests)
        for _ in range(6):
            rig.step()
        (cache,) = rig.caches[1:]
        held[keeps_up] = [cache.length(request.seq_id) for request in requests]
        if keeps_up:
            assert held[keeps_up] == [len(request.tokens) - 1 for request in requests]
        rig.finish()
    assert held[False] == [0, 0, 0]


class Careless(Recorded):
    """Fails in some calls, in one of the ways that a policy can."""

    def __init__(self, fault: str) -> None:
        super().__init__([3])
        self._fault = fault

    def choose(self, schedule: Schedule) -> list[int]:
        wishes = super().choose(schedule)
        if len(self.batches) % 3:
            return wishes
        if self._fault == "choose":
            raise ValueError("no idea")
        fractions: list[Any] = [1.5] * len(wishes)
        return {"too few": wishes[1:], "negative": [-1] * len(wishes), "fractions": fractions}.get(self._fault, wishes)

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        if self._fault == "observe" and len(self.batches) % 3 == 0:
            raise ValueError("no idea")


@pytest.mark.parametrize("fault", ["choose", "observe", "too few", "negative", "fractions"])
def test_policy_that_fails_costs_drafts_alone(fault: str) -> None:
    outputs = {}
    for policy in (Recorded([3]), Careless(fault)):
        rig = run(policy, temperature=0.0)
        requests = list(rig.requests)
        told = rig.finish()
        assert {request.ending.reason for request in requests} == {"length"}
        assert rig.engine.metrics.repeated_steps == 0
        assert len(told) == sum(request.num_output for request in requests), "every token is told once"
        outputs[type(policy)] = [request.output for request in requests]
    assert outputs[Careless] == outputs[Recorded]


def test_policy_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        run(Careless("choose")).finish()
    assert sum("draft length policy failed" in record.message for record in caplog.records) == 1


def test_policy_of_another_package_need_not_extend_the_class() -> None:
    """What it does not define is as usual: it never keeps up, pauses, trims or selects."""

    class Minimal:
        def choose(self, schedule: Schedule) -> list[int]:
            return [2] * len(schedule.items)

        def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
            pass

    rig = run(completed(Minimal()))
    requests = list(rig.requests)
    rig.finish()
    assert {request.ending.reason for request in requests} == {"length"}
