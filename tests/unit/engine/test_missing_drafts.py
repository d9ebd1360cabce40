"""An engine's drafter that returns nothing is seldom called, and forced rows reach the draft-length policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.drafting import ModelDrafter
from speculant.kernels import usable_sets
from speculant.lengths import UNKNOWN_COSTS, Adaptive, Calibration, CostCurve, DraftOutcome, StepCosts
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from tests.models import Checkpoints, Shape, write_checkpoint

BACKENDS = ["reference", *(["native"] if usable_sets() else [])]
PARAMS = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
PROMPT = [65 + place % 20 for place in range(100)]


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a draft model that holds fewer tokens than the prompt has."""
    return write_checkpoint(tmp_path_factory.mktemp("short") / "draft", Shape(max_positions=64))


def engine(checkpoints: Checkpoints, draft: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Make an engine whose drafts look free."""
    monkeypatch.setattr(Calibration, "costs", lambda self: StepCosts(CostCurve(UNKNOWN_COSTS)))
    config = {"method": "draft_model", "draft_length": "adaptive"}
    arguments: dict[str, Any] = {"dtype": "float32", "kernels": backend, "draft_quantization": "none"}
    return LLM(checkpoints.target, draft, speculative_config=config, **arguments)


def calls_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return a list that gets the lengths of each step in which the policy asks for drafts."""
    made, choose = list[list[int]](), Adaptive.choose

    def record(self: Adaptive, schedule: Schedule) -> list[int]:
        lengths = choose(self, schedule)
        made.extend([lengths] if any(lengths) else [])
        return lengths

    monkeypatch.setattr(Adaptive, "choose", record)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fails", [False, True], ids=["too short", "fails"])
def test_a_drafter_that_returns_nothing_is_seldom_called(
    checkpoints: Checkpoints,
    short_draft: str,
    backend: str,
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no")

    llm = engine(checkpoints, checkpoints.near if fails else short_draft, backend, monkeypatch)
    if fails:
        monkeypatch.setattr(ModelDrafter, "propose", fail)
    calls = calls_of(llm, monkeypatch)
    (found,) = llm.generate([PROMPT], PARAMS)
    assert len(found.outputs[0].token_ids) == 150
    assert 8 <= len(calls) <= 20
    assert llm.engine.metrics.drafter_errors == fails * len(calls)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_policy_observes_missing_and_forced_nodes(
    checkpoints: Checkpoints, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    seen = list[tuple[int, DraftOutcome]]()

    def choose(self: Adaptive, schedule: Schedule) -> list[int]:
        return [5] * len(schedule.items)

    def observe(self: Adaptive, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        seen.extend((each.request.index if each.request.constraint is None else -1, each) for each in outcomes)

    propose = ModelDrafter.propose
    monkeypatch.setattr(Adaptive, "choose", choose)
    monkeypatch.setattr(Adaptive, "observe", observe)
    monkeypatch.setattr(Adaptive, "pause", lambda self: 0)
    monkeypatch.setattr(
        ModelDrafter, "propose", lambda self, seqs, limits: [each.first(2) for each in propose(self, seqs, limits)]
    )
    llm = engine(checkpoints, checkpoints.near, backend, monkeypatch)
    form = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "abcdefgh(x|y){9}"})
    llm.generate(["def f", "import"], [form, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)])
    forced = [each for place, each in seen if place < 0 and each.forced]
    assert sum(sum(each.drafted) for each in forced) >= 6
    assert all(sum(each.accepted) == sum(each.drafted) and not each.missing for each in forced)
    free = [each for place, each in seen if place == 0]
    assert not any(each.forced for each in free)
    assert {(len(each.drafted), each.missing) for each in free} >= {(2, 3)}
