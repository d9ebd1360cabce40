"""A sample's pieces are the output's text, token by token; it also has the phases of the steps."""

from __future__ import annotations

import pytest

from speculant.config import EngineConfig
from speculant.engine import PHASES, build_engine, unmarked
from speculant.lab.bench import (
    LINE_END,
    Bench,
    Span,
    Workload,
    both_ways,
    chrome_trace,
    page,
    recorded,
    take_samples,
    ways_of,
)
from speculant.params import SamplingParams
from speculant.text import IncrementalDetokenizer
from tests.models import Checkpoints

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WORKLOAD = Workload("test", [[65, 66, 67], [68]])


class Sampled:
    """An engine, and its samples without drafts and with them."""

    def __init__(self, target: str, draft: str) -> None:
        self.runtime = build_engine(EngineConfig(target, draft, spec_length=4, dtype="float64"))
        ways = ways_of(Bench(self.runtime), both_ways(PARAMS, speculating=True))
        self.plain, self.drafted = take_samples(WORKLOAD, ways)


@pytest.fixture(scope="module")
def near(checkpoints: Checkpoints) -> Sampled:
    return Sampled(checkpoints.target, checkpoints.near)


@pytest.fixture(scope="module")
def far(checkpoints: Checkpoints) -> Sampled:
    return Sampled(checkpoints.target, checkpoints.far)


def test_pieces_are_the_output(near: Sampled) -> None:
    runtime, plain, speculative = near.runtime, near.plain, near.drafted
    [expected, _] = Bench(runtime, "again").run(WORKLOAD, both_ways(PARAMS, speculating=True)["plain"]).outputs
    for sample in (plain, speculative):
        assert "".join(piece.text for piece in sample.pieces) == runtime.tokenizer.decode(
            list(expected), skip_special_tokens=False
        )
        assert {span.phase for span in sample.spans} == set(PHASES)
    assert not any(piece.drafted or piece.rejected for piece in plain.pieces)
    assert (plain.drafts, speculative.drafts) == (False, True)
    assert [piece.burst for piece in plain.pieces] == list(range(24))
    assert any(piece.drafted for piece in speculative.pieces)
    assert speculative.prompt == runtime.tokenizer.decode([65, 66, 67])


def test_every_burst_ends_with_the_targets_own_token(near: Sampled) -> None:
    sample = near.drafted
    last = {piece.burst: piece.drafted for piece in sample.pieces}
    assert not any(list(last.values())[:-1])
    counts = [sum(piece.burst == burst for piece in sample.pieces) for burst in last]
    assert max(counts) > 1
    assert sum(piece.drafted for piece in sample.pieces) >= len(sample.pieces) - len(counts) - 1


def test_rejected_tokens_are_shown_in_the_place_of_their_test(far: Sampled) -> None:
    sample = far.drafted
    bursts = [piece.burst for piece in sample.pieces]
    ends = [bursts.index(burst + 1) - 1 for burst in range(bursts[-1])]
    corrected = [place for place, piece in enumerate(sample.pieces) if piece.kind == "corrected"]
    assert len(corrected) > len(sample.pieces) / 2, "this draft hardly ever agrees"
    assert set(corrected) <= {*ends, len(bursts) - 1}, "a rejection ends a step"
    for place in corrected:
        assert not sample.pieces[place].drafted
        assert len(sample.pieces[place].rejected) == 1, "of a chain one token is tested and rejected"
    assert sum(piece.kind == "accepted" for piece in sample.pieces) == sum(piece.drafted for piece in sample.pieces)


def test_a_tree_shows_every_rejected_sibling(checkpoints: Checkpoints) -> None:
    tree = {"model": checkpoints.far, "tree": [3, 1], "draft_length": "fixed"}
    drawn = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True)
    settings = EngineConfig.from_arguments(model=checkpoints.target, dtype="float64", speculative_config=tree)
    ways = ways_of(Bench(build_engine(settings)), both_ways(drawn, speculating=True))
    sample = take_samples(WORKLOAD, ways)[1]
    assert {len(piece.rejected) for piece in sample.pieces if piece.rejected} >= {3}


def test_rejected_text_does_not_change_the_output(far: Sampled) -> None:
    plain, drafted = far.plain, far.drafted
    assert "".join(piece.text for piece in plain.pieces) == "".join(piece.text for piece in drafted.pieces)
    assert all(text and "\n" not in text for piece in drafted.pieces for text in piece.rejected)


def test_a_rejected_line_end_is_shown(checkpoints: Checkpoints) -> None:
    tokenizer = build_engine(EngineConfig(checkpoints.target)).tokenizer
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    first, end, other = tokenizer.encode("a\nb")
    shown = [detokenizer.push(first), page._text_of(end, detokenizer), page._text_of(other, detokenizer)]
    assert [*shown, detokenizer.push(end), detokenizer.push(other)] == ["a", LINE_END, "b", "\n", "b"]


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
