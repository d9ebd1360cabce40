"""A sample's pieces are the output's text, token by token, with its phases beside them."""

from __future__ import annotations

from speculant.bench.measuring import both_ways
from speculant.bench.runs import Bench
from speculant.bench.samples import take_samples
from speculant.bench.timeline import Span, chrome_trace, recorded
from speculant.bench.workloads import Workload
from speculant.config import EngineConfig
from speculant.engine.build import build_engine
from speculant.engine.profiling import PHASES, unmarked
from speculant.params import SamplingParams
from tests.models import Checkpoints

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WORKLOAD = Workload("test", [[65, 66, 67], [68]], [0.0, 0.0])


def test_pieces_are_the_output(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near, spec_length=4, dtype="float64")
    runtime = build_engine(config)
    modes = both_ways(PARAMS, speculating=True)
    plain, speculative = take_samples(runtime, WORKLOAD, modes)
    [expected, _] = Bench(runtime).run(WORKLOAD, modes["plain"]).outputs
    for sample in (plain, speculative):
        assert "".join(piece.text for piece in sample.pieces) == runtime.tokenizer.decode(
            list(expected), skip_special_tokens=False
        )
        assert {span.phase for span in sample.spans} == set(PHASES)
    assert not any(piece.drafted for piece in plain.pieces)
    assert [piece.burst for piece in plain.pieces] == list(range(24))
    assert any(piece.drafted for piece in speculative.pieces)
    assert speculative.prompt == runtime.tokenizer.decode([65, 66, 67])


def test_every_burst_ends_with_the_targets_own_token(checkpoints: Checkpoints) -> None:
    runtime = build_engine(EngineConfig(checkpoints.target, checkpoints.near, spec_length=4, dtype="float64"))
    _, sample = take_samples(runtime, WORKLOAD, both_ways(PARAMS, speculating=True))
    last = {piece.burst: piece.drafted for piece in sample.pieces}
    assert not any(list(last.values())[:-1])
    counts = [sum(piece.burst == burst for piece in sample.pieces) for burst in last]
    assert max(counts) > 1
    assert sum(piece.drafted for piece in sample.pieces) >= len(sample.pieces) - len(counts) - 1


def test_recording_ends_with_its_block(checkpoints: Checkpoints) -> None:
    runtime = build_engine(EngineConfig(checkpoints.target, use_speculative_decoding=False, dtype="float64"))
    with recorded(runtime.engine) as spans:
        Bench(runtime).run(WORKLOAD, both_ways(PARAMS, speculating=False)["plain"])
    count = len(spans)
    assert count >= 24 * len(PHASES)
    assert all(span.start <= span.end for span in spans)
    assert runtime.engine.mark is unmarked
    Bench(runtime, "again").run(WORKLOAD, both_ways(PARAMS, speculating=False)["plain"])
    assert len(spans) == count


def test_trace_counts_microseconds_from_each_tracks_start() -> None:
    trace = chrome_trace({"a": [Span("draft", 5.0, 5.5)], "b": [Span("draft", 7.0, 7.25), Span("verify", 8.0, 8.5)]})
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert spans == [(1, "draft", 0.0, 5e5), (2, "draft", 0.0, 2.5e5), (2, "verify", 1e6, 5e5)]
    assert chrome_trace({"none": []})["traceEvents"][0]["args"] == {"name": "none"}
