"""Costs of steps come from the engine's own clocks, for the given lengths."""

from __future__ import annotations

import pytest

from speculant.config import EngineConfig
from speculant.engine import Runtime, build_around, build_engine
from speculant.errors import RequestError
from speculant.lab.bench import LengthCosts, measure_steps, measuring
from speculant.params import SamplingParams
from tests.models import Checkpoints

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def make_runtime(checkpoints: Checkpoints, draft: str, **arguments: object) -> Runtime:
    arguments = {"dtype": "float64", "speculative_config": {"draft_length": "fixed"}, "max_num_seqs": 1, **arguments}
    return build_engine(EngineConfig.from_arguments(model=checkpoints.target, draft_model=draft, **arguments))


def test_costs_of_a_token_and_of_a_draft_are_a_line() -> None:
    found = LengthCosts((0, 1, 2, 4), (0.5, 3.0, 4.0, 6.0), (9.5, 10.0, 11.0, 12.0))
    assert found.plain_s == 10.0
    assert found.cost_ratio == pytest.approx(0.1)
    assert found.overhead == pytest.approx(0.2)
    falling = LengthCosts((0, 1, 3), (0.0, 3.0, 1.0), (10.0, 10.0, 10.0))
    assert (falling.cost_ratio, falling.overhead) == (0.0, pytest.approx(0.2))
    steep = LengthCosts((0, 1, 3), (0.0, 1.0, 7.0), (10.0, 10.0, 10.0))
    assert (steep.cost_ratio, steep.overhead) == (pytest.approx(0.22), 0.0)


def test_each_length_is_measured(checkpoints: Checkpoints) -> None:
    runtimes = {"near": make_runtime(checkpoints, checkpoints.near), "far": make_runtime(checkpoints, checkpoints.far)}
    lengths = {"near": (0, 1, 3, 8), "far": (0, 2)}
    before = {name: runtime.engine.metrics.steps for name, runtime in runtimes.items()}
    found = measure_steps(lengths, runtimes, [65, 66, 67], GREEDY, seconds=0.0)
    assert set(found) == {"near", "far"}
    for name, each in found.items():
        assert each.lengths == lengths[name]
        assert len(each.draft_s) == len(each.other_s) == len(lengths[name])
        assert min(each.other_s) > 0
        assert each.draft_s[0] < min(each.draft_s[1:]), "plain steps draft nothing"
        assert not runtimes[name].engine.has_unfinished()
        assert runtimes[name].engine.metrics.steps > before[name]
    near = found["near"]
    assert near.draft_s[1] < near.draft_s[3], "eight tokens take longer than one"


def test_only_whole_drafts_count(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts drafted tokens, so the costs show which steps count: none of prompts or shortened drafts."""
    runtime = make_runtime(checkpoints, checkpoints.near)
    monkeypatch.setattr(measuring, "_difference", lambda before, after: measuring.StepTime(after.steps, 1.0))
    times = measuring._sample(runtime, [65, 66, 67], GREEDY, 5, iter(["a"]))
    assert len(times) == measuring.STEPS
    assert times[0].draft_s >= 3, "the prompt's step and the first draft are left out"


def test_lower_quartile_ignores_other_programs() -> None:
    usual, hit = measuring.StepTime(1.0, 2.0), measuring.StepTime(9.0, 9.0)
    found = measuring._typical((0, 1), [[[usual, hit], [usual, hit, usual]], [[hit], [usual, usual]]])
    assert found.draft_s == [1.0, 1.0]
    assert found.other_s == [2.0, 2.0]


def test_no_draft_costs_more_than_a_longer_one() -> None:
    """The steps of a busy machine, in which other programs disturbed nearly every draft of two tokens."""
    own = ((1.0, 1.0, 1.0), (1.04, 1.1, 1.1), (2.0, 3.64, 3.64), (1.9, 2.79, 2.79))
    quiet = [[[measuring.StepTime(0.0, seconds) for seconds in times]] for times in own]
    found = measuring._typical((0, 1, 2, 4), quiet)
    assert found.other_s == pytest.approx([1.0, 1.07, 2.345, 2.345])
    assert found.spread == pytest.approx((1.0 + 1.1 + 3.64 + 2.79) / (1.0 + 1.04 + 2.0 + 1.9))


def test_draft_without_room_is_explained(checkpoints: Checkpoints) -> None:
    runtime = make_runtime(checkpoints, checkpoints.near, max_model_len=12)
    with pytest.raises(RequestError, match="drafts of 8 tokens after a prompt of 3 do not fit"):
        measure_steps({"near": (0, 8)}, {"near": runtime}, [65, 66, 67], GREEDY, seconds=0.0)
    assert not runtime.engine.has_unfinished()


def test_engines_share_a_target(checkpoints: Checkpoints) -> None:
    one = make_runtime(checkpoints, checkpoints.near)
    config = EngineConfig(checkpoints.target, checkpoints.far, dtype="float64")
    other = build_around(config, one.checkpoint)
    assert other.checkpoint.model is one.checkpoint.model
    assert other.engine is not one.engine
