"""The measurements, predictions and errors of a sweep."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.lab.bench import (
    SweepPlan,
    WorkloadConfig,
    chains_of,
    compare,
    measure_steps,
    predict_sweep,
    sweep_params,
)
from speculant.params import SamplingParams
from tests.models import Checkpoints
from tests.unit.lab.bench.test_step_costs import make_runtime

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
CODE = WorkloadConfig("code", num_prompts=3)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"lengths": ()}, "length"),
        ({"lengths": (0, 1)}, "length"),
        ({"lengths": (2, 1)}, "ascend"),
        ({"lengths": (2, 2)}, "ascend"),
        ({"lengths": (600,)}, "from 1 to 512"),
        ({"batches": (0,)}, "batch"),
        ({"batches": (4, 2)}, "ascend"),
        ({"rounds": 0}, "rounds=0"),
    ],
)
def test_an_invalid_sweep_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SweepPlan(CODE, 4, **values)


def test_a_batch_runs_whole() -> None:
    plan = SweepPlan(CODE, 4, (1, 2), (1, 2, 8), rounds=2)
    assert [plan.num_prompts(batch) for batch in plan.batches] == [3, 4, 8]
    assert plan.num_runs == 2 * 3 * 3


def test_a_sweep_drafts_chains_of_any_length() -> None:
    config = chains_of(EngineConfig("target", "draft"))
    spec = config.speculative()
    assert spec is not None
    assert (spec.policy["policy"], spec.num_speculative_tokens, spec.model) == ("fixed", None, "draft")
    assert config.draft_quantization is None, "the weights stay as they are"
    assert chains_of(EngineConfig("target", "draft", draft_quantization="int8")).draft_quantization == "int8"
    named = {"method": "draft_model", "model": "draft", "verification": "block"}
    chosen = chains_of(EngineConfig("target", speculative_config=named)).speculative()
    assert chosen is not None
    assert chosen.verification == "block"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (EngineConfig("target"), "no draft model"),
        (EngineConfig("target", "draft", use_speculative_decoding=False), "no draft model"),
        (EngineConfig("target", "draft", spec_length=4), "length itself"),
        (EngineConfig("target", speculative_config={"method": "suffix"}), "no draft model"),
        (EngineConfig("target", "draft", speculative_config={"method": "merge"}), "another way to draft"),
        (EngineConfig("target", "draft", speculative_config={"tree": [2, 1]}), "another way to draft"),
    ],
)
def test_other_ways_to_draft_are_refused(config: EngineConfig, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        chains_of(config)


def test_a_prediction_is_that_of_its_own_prompts(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "_COST_SECONDS", 0.0)
    config = chains_of(EngineConfig(checkpoints.target, checkpoints.target, dtype="float64"))
    parts = list[str]()
    plan = SweepPlan(CODE, 4, (1, 3), (1, 2))
    alone, two = predict_sweep(config, plan, sweep_params(GREEDY), parts.append)
    assert [len(each.workload.prompts) for each in (alone, two)] == [3, 4]
    assert len({tuple(prompt) for prompt in two.workload.prompts}) == 4
    for each in (alone, two):
        assert each.prediction.alpha.mean == 1.0, "the draft is the target"
        assert each.prediction.tokens[:2].tolist() == pytest.approx([1.0, 23 / 12])
        assert len(each.prediction.speeds) == 4
        assert each.runtime.limits.max_num_seqs == each.batch
    assert parts[-1] == "Measuring the cost of steps, 2 at a time"


@pytest.mark.slow  # the prediction before it measures as much
def test_prompts_of_a_file_are_repeated(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(compare, "_COST_SECONDS", 0.0)
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    config = chains_of(EngineConfig(checkpoints.target, checkpoints.near, dtype="float64"))
    plan = SweepPlan(WorkloadConfig(str(path)), 4, (2,), (5,))
    [found] = predict_sweep(config, plan, sweep_params(GREEDY), lambda part: None)
    first, second = found.workload.prompts[:2]
    assert first != second
    assert found.workload.prompts == [first, second, first, second, first]


def test_steps_of_several_sequences_are_measured(checkpoints: Checkpoints) -> None:
    runtime = make_runtime(checkpoints, checkpoints.near, max_num_seqs=3)
    before = runtime.engine.metrics.draft_tokens
    found = measure_steps({"near": (0, 2)}, {"near": runtime}, [65, 66, 67], GREEDY, seconds=0.0, batch=3)["near"]
    assert found.lengths == (0, 2)
    assert min(found.other_s) > 0
    assert (runtime.engine.metrics.draft_tokens - before) % 6 == 0, "three sequences, two tokens each"
    assert not runtime.engine.has_unfinished()
