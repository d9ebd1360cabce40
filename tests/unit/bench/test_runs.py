"""One run: every token accounted for, nothing shared between runs, the engine left empty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speculant import LLM
from speculant.bench.runs import Bench, Mode, Run
from speculant.bench.workloads import Workload, WorkloadConfig, make_workload
from speculant.config import EngineConfig
from speculant.engine.build import Built, build_engine
from speculant.errors import CapacityError, RequestError
from speculant.params import SamplingParams
from tests.models import Checkpoints

TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PLAIN = Mode(replace(GREEDY, speculation=False))
SPECULATIVE = Mode(GREEDY)


def _build(checkpoints: Checkpoints, draft: bool = True, **values: Any) -> Built:
    draft_model = checkpoints.near if draft else None
    return build_engine(EngineConfig(checkpoints.target, draft_model, dtype="float64", **values))


def _workload(built: Built, number: int = 5, **values: Any) -> Workload:
    return make_workload(WorkloadConfig(num_prompts=number, **values), built, number)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("mode", [PLAIN, SPECULATIVE])
def test_a_run_gives_what_generate_gives(checkpoints: Checkpoints, mode: Mode, sequential: bool) -> None:
    built = _build(checkpoints)
    workload = _workload(built)
    run = Bench(built).run(workload, replace(mode, sequential=sequential))
    expected = LLM(checkpoints.target, dtype="float64").generate(list(workload.prompts), GREEDY)
    assert list(run.outputs) == [out.outputs[0].token_ids for out in expected]
    assert [timing.num_tokens for timing in run.timings] == [TOKENS] * 5
    assert all(len(timing.gaps) == TOKENS - 1 for timing in run.timings)
    assert (run.rule is None) == (mode is PLAIN)


@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_figures_add_up(checkpoints: Checkpoints, backend: str) -> None:
    built = _build(checkpoints, kv_cache_backend=backend)
    bench, workload = Bench(built), _workload(built)
    plain, fast = bench.run(workload, PLAIN).figures(), bench.run(workload, SPECULATIVE).figures()
    assert plain["tokens"] == fast["tokens"] == 5 * TOKENS
    assert plain["steps"] == TOKENS, "all run together, a token each a step"
    assert plain["tokens_per_step"] == 5
    assert plain["mean_acceptance_length"] == 1
    assert "acceptance_rate" not in plain
    assert fast["steps"] < plain["steps"]
    assert fast["mean_acceptance_length"] > 1
    assert 0 < fast["acceptance_rate"] <= 1
    assert fast["tokens_per_s"] == pytest.approx(fast["tokens"] / fast["seconds"])
    assert fast["itl_p50_s"] <= fast["itl_p90_s"] <= fast["itl_p99_s"]
    assert 0 < plain["peak_blocks"] <= built.engine.metrics.blocks_total
    alone = bench.run(workload, replace(PLAIN, sequential=True)).figures()
    assert alone["steps"] == 5 * TOKENS
    assert alone["peak_blocks"] <= plain["peak_blocks"]


def test_a_single_token_has_no_gaps(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints)
    figures = Bench(built).run(_workload(built), Mode(replace(GREEDY, max_tokens=1))).figures()
    assert figures["tokens"] == 5
    assert figures["ttft_s"] > 0
    assert not {"itl_mean_s", "itl_p50_s", "request_tokens_per_s"} & set(figures)


def test_samples_count_each(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints)
    run = Bench(built).run(_workload(built, 2), Mode(replace(GREEDY, temperature=1.0, seed=1, n=3)))
    assert len(run.outputs) == len(run.timings) == 6
    assert run.figures()["tokens"] == 6 * TOKENS


def test_runs_share_no_prefixes_but_their_prompts_do(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints, block_size=4)
    bench = Bench(built)
    same = Workload("same", [list(range(40, 61))] * 3, [0.0] * 3)
    first, second = (bench.run(same, replace(PLAIN, sequential=True)) for _ in range(2))
    assert first.prefix_hit_tokens == second.prefix_hit_tokens == 2 * 20
    single = replace(same, prompts=same.prompts[:1], arrivals=[0.0])
    assert bench.run(single, PLAIN).prefix_hit_tokens == 0
    off = _build(checkpoints, block_size=4, enable_prefix_caching=False)
    assert Bench(off).run(same, replace(PLAIN, sequential=True)).prefix_hit_tokens == 0


def test_preemptions_are_counted_for_each_run(checkpoints: Checkpoints) -> None:
    tight = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4}
    per_token = _build(checkpoints, draft=False, **tight).checkpoint.model.cache_shape.bytes_per_token
    built = _build(checkpoints, draft=False, kv_memory=160 * per_token, **tight)
    workload, bench = _workload(built, 4, prompts="random", prompt_length=12), Bench(built)
    long = replace(PLAIN, params=replace(PLAIN.params, max_tokens=40))
    counts = [bench.run(workload, long).preemptions for _ in range(2)]
    assert counts[0] == counts[1] > 0
    assert bench.run(workload, replace(long, sequential=True)).preemptions == 0


def test_more_prompts_than_may_wait_are_handed_over_in_turn(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints, max_waiting=2, max_num_seqs=2)
    assert Bench(built).run(_workload(built, 9), PLAIN).figures()["tokens"] == 9 * TOKENS


def test_samples_that_can_never_wait_are_an_error_not_a_wait(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints, max_waiting=2)
    with pytest.raises(CapacityError):
        Bench(built).run(_workload(built), Mode(replace(GREEDY, n=3)))


def test_timings_count_from_when_a_prompt_was_due(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints)
    bench = Bench(built)
    at_once = bench.run(_workload(built), PLAIN)
    assert len({timing.arrival for timing in at_once.timings}) == 1
    workload = _workload(built, request_rate=500.0)
    arrivals = [timing.arrival for timing in bench.run(workload, PLAIN).timings]
    assert [arrival - arrivals[0] for arrival in arrivals] == pytest.approx(workload.arrivals)
    alone = bench.run(_workload(built), replace(PLAIN, sequential=True)).timings
    ends = [timing.last_token for timing in alone]
    assert all(end is not None and end <= later.arrival for end, later in zip(ends, alone[1:], strict=False))


def test_a_token_counts_when_the_step_has_handed_it_over(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _build(checkpoints)
    step, ended = built.engine.step, list[float]()

    def timed() -> Any:
        import time

        outputs = step()
        ended.append(time.perf_counter())
        return outputs

    monkeypatch.setattr(built.engine, "step", timed)
    run = Bench(built).run(_workload(built, 1), PLAIN)
    assert run.timings[0].first_token is not None
    assert run.timings[0].first_token >= ended[0]


def test_an_error_is_raised_and_leaves_the_engine_empty(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = _build(checkpoints)
    bad = Workload("bad", [[1, 2], [10**6]], [0.0, 0.0])
    with pytest.raises(RequestError, match="1000000"):
        Bench(built).run(bad, PLAIN)
    assert not built.engine.has_unfinished()

    def broken(*arguments: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(built.engine._parts.target, "forward", broken)
    with pytest.raises(ValueError, match="broken"):
        Bench(built).run(_workload(built), PLAIN)
    assert not built.engine.has_unfinished()


def test_warming_up_is_short(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints)
    workload = _workload(built)
    Bench(built).warm_up(workload, Mode(replace(GREEDY, min_tokens=TOKENS, speculation=False)))
    assert built.engine.metrics.tokens == 8
    assert built.engine.metrics.finished == 1


def test_stops_end_a_request_as_ever(checkpoints: Checkpoints) -> None:
    built = _build(checkpoints)
    workload = _workload(built, 1)
    [whole] = Bench(built).run(workload, PLAIN).outputs
    text = built.tokenizer.decode(whole)
    stopped: Run = Bench(built).run(workload, Mode(replace(GREEDY, stop=[text[4:6]])))
    assert len(stopped.outputs[0]) <= 6
