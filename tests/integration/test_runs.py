"""One run: every token accounted for, nothing shared between runs, the engine left empty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speculant import LLM
from speculant.config import EngineConfig
from speculant.engine import Runtime, build_engine
from speculant.errors import CapacityError, RequestError
from speculant.lab.bench import Bench, BenchRun, Mode, Workload, WorkloadConfig, make_workload
from speculant.params import SamplingParams
from tests.models import EXACT_DTYPE, Checkpoints

TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PLAIN = Mode(replace(GREEDY, speculation=False))
SPECULATIVE = Mode(GREEDY)


def _build(checkpoints: Checkpoints, draft: bool = True, **values: Any) -> Runtime:
    drafting: dict[str, Any] = {"draft_model": checkpoints.near, "spec_length": 5} if draft else {}
    return build_engine(EngineConfig(checkpoints.target, dtype=EXACT_DTYPE, **drafting, **values))


def _workload(runtime: Runtime, number: int = 5, **values: Any) -> Workload:
    return make_workload(WorkloadConfig(num_prompts=number, **values), runtime, number)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("mode", [PLAIN, SPECULATIVE])
def test_a_run_gives_what_generate_gives(checkpoints: Checkpoints, mode: Mode, sequential: bool) -> None:
    runtime = _build(checkpoints)
    workload = _workload(runtime)
    run = Bench(runtime).run(workload, replace(mode, sequential=sequential))
    expected = LLM(checkpoints.target, dtype=EXACT_DTYPE).generate(list(workload.prompts), GREEDY)
    assert list(run.outputs) == [out.outputs[0].token_ids for out in expected]
    assert [timing.num_tokens for timing in run.timings] == [TOKENS] * 5
    assert all(len(timing.gaps) == TOKENS - 1 for timing in run.timings)
    assert (run.verifier is None) == (mode is PLAIN)


@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_figures_add_up(checkpoints: Checkpoints, backend: str) -> None:
    runtime = _build(checkpoints, kv_cache_backend=backend)
    bench, workload = Bench(runtime), _workload(runtime)
    plain, fast = bench.run(workload, PLAIN).figures(), bench.run(workload, SPECULATIVE).figures()
    assert plain["tokens"] == fast["tokens"] == 5 * TOKENS
    assert plain["steps"] == TOKENS, "all run together, a token each a step"
    assert plain["tokens_per_step"] == 5
    assert plain["tokens_per_pass"] == plain["mean_acceptance_length"] == 1
    assert "acceptance_rate" not in plain
    assert fast["steps"] < plain["steps"]
    assert fast["mean_acceptance_length"] > 1
    assert 1 < fast["tokens_per_pass"] < fast["tokens_per_step"], "a step serves several sequences"
    assert 0 < fast["acceptance_rate"] <= 1
    assert fast["tokens_per_s"] == pytest.approx(fast["tokens"] / fast["seconds"])
    assert fast["itl_p50_s"] <= fast["itl_p90_s"] <= fast["itl_p99_s"]
    assert 0 < plain["peak_blocks"] <= runtime.engine.metrics.blocks_total
    alone = bench.run(workload, replace(PLAIN, sequential=True)).figures()
    assert alone["steps"] == 5 * TOKENS
    assert alone["peak_blocks"] <= plain["peak_blocks"]


def test_a_single_token_has_no_gaps(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints)
    figures = Bench(runtime).run(_workload(runtime), Mode(replace(GREEDY, max_tokens=1))).figures()
    assert figures["tokens"] == 5
    assert figures["ttft_s"] > 0
    assert not {"itl_mean_s", "itl_p50_s", "request_tokens_per_s"} & set(figures)


def test_samples_count_each(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints)
    run = Bench(runtime).run(_workload(runtime, 2), Mode(replace(GREEDY, temperature=1.0, seed=1, n=3)))
    assert len(run.outputs) == len(run.timings) == 6
    assert run.figures()["tokens"] == 6 * TOKENS


def test_runs_share_no_prefixes_but_their_prompts_do(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints, block_size=4)
    bench = Bench(runtime)
    same = Workload("same", [list(range(40, 61))] * 3)
    first, second = (bench.run(same, replace(PLAIN, sequential=True)) for _ in range(2))
    assert first.prefix_hit_tokens == second.prefix_hit_tokens == 2 * 20
    single = replace(same, prompts=same.prompts[:1], arrivals=[0.0])
    assert bench.run(single, PLAIN).prefix_hit_tokens == 0
    off = _build(checkpoints, block_size=4, enable_prefix_caching=False)
    assert Bench(off).run(same, replace(PLAIN, sequential=True)).prefix_hit_tokens == 0


def test_runs_of_two_benches_on_one_engine_share_nothing(checkpoints: Checkpoints) -> None:
    """The second one would find its prompts in the cache, and its drafts in the texts that the first one finished."""
    suffix = {"method": "suffix", "num_speculative_tokens": 8, "draft_length": "fixed"}
    runtime = _build(checkpoints, draft=False, block_size=4, speculative_config=suffix)
    long = Mode(replace(GREEDY, max_tokens=40))
    first, second = (Bench(runtime).run(_workload(runtime, 1), long) for _ in range(2))
    assert first.outputs == second.outputs
    assert (first.prefix_hit_tokens, first.steps) == (second.prefix_hit_tokens, second.steps)


def test_preemptions_are_counted_for_each_run(checkpoints: Checkpoints) -> None:
    tight = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4}
    per_token = _build(checkpoints, draft=False, **tight).checkpoint.model.cache_shape.bytes_per_token
    runtime = _build(checkpoints, draft=False, kv_memory=160 * per_token, **tight)
    workload, bench = _workload(runtime, 4, prompts="random", prompt_length=12), Bench(runtime)
    long = replace(PLAIN, params=replace(PLAIN.params, max_tokens=40))
    counts = [bench.run(workload, long).preemptions for _ in range(2)]
    assert counts[0] == counts[1] > 0
    assert bench.run(workload, replace(long, sequential=True)).preemptions == 0


def test_more_prompts_than_may_wait_are_handed_over_in_turn(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints, max_waiting=2, max_num_seqs=2)
    assert Bench(runtime).run(_workload(runtime, 9), PLAIN).figures()["tokens"] == 9 * TOKENS


def test_samples_that_can_never_wait_are_an_error(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints, max_waiting=1, max_num_seqs=1)
    with pytest.raises(CapacityError):
        Bench(runtime).run(_workload(runtime), Mode(replace(GREEDY, n=3)))


def test_timings_count_from_when_a_prompt_was_due(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints)
    bench = Bench(runtime)
    at_once = bench.run(_workload(runtime), PLAIN)
    assert len({timing.arrival for timing in at_once.timings}) == 1
    workload = _workload(runtime, request_rate=500.0)
    arrivals = [timing.arrival for timing in bench.run(workload, PLAIN).timings]
    assert [arrival - arrivals[0] for arrival in arrivals] == pytest.approx(workload.arrivals)
    alone = bench.run(_workload(runtime), replace(PLAIN, sequential=True)).timings
    ends = [timing.last_token for timing in alone]
    assert all(end is not None and end <= later.arrival for end, later in zip(ends, alone[1:], strict=False))


def test_a_token_counts_when_the_step_has_handed_it_over(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _build(checkpoints)
    step, ended = runtime.engine.step, list[float]()

    def timed() -> Any:
        import time

        outputs = step()
        ended.append(time.perf_counter())
        return outputs

    monkeypatch.setattr(runtime.engine, "step", timed)
    run = Bench(runtime).run(_workload(runtime, 1), PLAIN)
    assert run.timings[0].first_token is not None
    assert run.timings[0].first_token >= ended[0]


def test_an_error_is_raised_and_leaves_the_engine_empty(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = _build(checkpoints)
    bad = Workload("bad", [[1, 2], [10**6]])
    with pytest.raises(RequestError, match="1000000"):
        Bench(runtime).run(bad, PLAIN)
    assert not runtime.engine.has_unfinished()

    def broken(*arguments: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(runtime.engine._context.target, "forward", broken)
    with pytest.raises(ValueError, match="broken"):
        Bench(runtime).run(_workload(runtime), PLAIN)
    assert not runtime.engine.has_unfinished()


def test_warming_up_is_short(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints)
    workload = _workload(runtime)
    Bench(runtime).warm_up(workload, Mode(replace(GREEDY, min_tokens=TOKENS, speculation=False)))
    assert runtime.engine.metrics.tokens == 8
    assert runtime.engine.metrics.finished == 1


def test_stops_end_a_benchmark_s_request(checkpoints: Checkpoints) -> None:
    runtime = _build(checkpoints)
    workload = _workload(runtime, 1)
    [whole] = Bench(runtime).run(workload, PLAIN).outputs
    text = runtime.tokenizer.decode(whole)
    stopped: BenchRun = Bench(runtime).run(workload, Mode(replace(GREEDY, stop=[text[4:6]])))
    assert len(stopped.outputs[0]) <= 6
