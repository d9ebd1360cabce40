"""Streaming: the same text in pieces, several at once, and nothing left behind when a reader goes away."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from speculant import LLM, SamplingParams, StreamPiece
from speculant.errors import RequestError
from tests.integration.conftest import MakeLLM

TEXTS = ["def read(path):", "class A:", "import os"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=6, max_tokens=24)
ENGINES: list[dict[str, Any]] = [{}, {"draft": "near"}, {"draft": "target"}]


@pytest.mark.parametrize("arguments", ENGINES, ids=["plain", "near", "perfect"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_pieces_make_the_whole(llm_of: MakeLLM, arguments: dict[str, Any], params: SamplingParams) -> None:
    llm = llm_of(**arguments)
    (whole,) = llm.generate(TEXTS[0], params)
    pieces = list(llm.stream(TEXTS[0], params))
    assert [piece.token for piece in pieces] == whole.outputs[0].token_ids
    assert "".join(piece.text for piece in pieces) == whole.outputs[0].text
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [piece.output is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    last = pieces[-1].output
    assert last is not None
    assert last.outputs[0] == whole.outputs[0]
    accepted = last.metrics.speculative_decoding.num_accepted_draft_tokens
    assert sum(piece.drafted for piece in pieces) == accepted


def test_no_piece_shows_half_a_character(llm_of: MakeLLM) -> None:
    """Bytes that form a character come with the last of them; broken ones show up as they do in the whole text."""
    llm = llm_of("near")
    umlaut = llm.tokenizer.encode("ä")
    forced = SamplingParams(temperature=0, logit_bias=dict.fromkeys(umlaut, 1000.0), max_tokens=8)
    pieces = list(llm.stream(TEXTS[0], forced))
    assert pieces[-1].output is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].output.outputs[0].text


def test_beams_are_streamed_when_they_have_won(llm_of: MakeLLM) -> None:
    """No piece comes before the last step, and then every beam has its own text, beside a stream that goes on."""
    llm, params = llm_of("near"), SamplingParams(beam_width=3, n=2, max_tokens=12, min_tokens=2)
    (whole,) = llm.generate(TEXTS[0], params)
    other = llm.stream(TEXTS[1], GREEDY)
    next(other)
    pieces = list(llm.stream(TEXTS[0], params))
    for index, beam in enumerate(whole.outputs):
        own = [piece for piece in pieces if piece.index == index]
        assert joined(own) == (beam.token_ids, beam.text)
        assert own[-1].finish_reason == beam.finish_reason
    last = pieces[-1].output
    assert last is not None
    assert [beam.score for beam in last.outputs] == pytest.approx([beam.score for beam in whole.outputs])
    assert sum(piece.output is not None for piece in pieces) == 1
    assert len(list(other)) == GREEDY.max_tokens - 1


def test_samples_are_streamed_side_by_side(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    params = SamplingParams(n=3, seed=1, max_tokens=12)
    (whole,) = llm.generate(TEXTS[0], params)
    said: dict[int, list[StreamPiece]] = {0: [], 1: [], 2: []}
    for piece in llm.stream(TEXTS[0], params):
        said[piece.index].append(piece)
    assert [[piece.token for piece in said[index]] for index in range(3)] == [s.token_ids for s in whole.outputs]
    assert ["".join(piece.text for piece in said[index]) for index in range(3)] == [s.text for s in whole.outputs]
    assert sum(piece.output is not None for pieces in said.values() for piece in pieces) == 1


def joined(pieces: list[StreamPiece]) -> tuple[list[int], str]:
    return [piece.token for piece in pieces], "".join(piece.text for piece in pieces)


def test_streams_may_be_read_in_turn(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    alone = [joined(list(llm.stream(text, GREEDY))) for text in TEXTS]
    together: list[list[StreamPiece]] = [[], [], []]
    for pieces in itertools.zip_longest(*(llm.stream(text, GREEDY) for text in TEXTS)):
        for said, piece in zip(together, pieces, strict=True):
            said += [piece] if piece else []
    assert [joined(pieces) for pieces in together] == alone


def test_a_stream_survives_a_generate_beside_it(llm_of: MakeLLM) -> None:
    """Whichever call steps the engine, every stream gets all of its own tokens."""
    llm = llm_of("near")
    expected, (other,) = joined(list(llm.stream(TEXTS[0], GREEDY))), llm.generate(TEXTS[1], GREEDY)
    stream = llm.stream(TEXTS[0], GREEDY)
    pieces = [next(stream)]
    assert llm.generate(TEXTS[1], GREEDY)[0].outputs == other.outputs
    with pytest.raises(RequestError):
        llm.generate([TEXTS[1], ""], GREEDY)
    assert joined([*pieces, *stream]) == expected


@pytest.mark.parametrize("read", [0, 1, 5])
def test_closing_a_stream_aborts_its_request(llm_of: MakeLLM, read: int) -> None:
    llm = llm_of("near")
    stream = llm.stream(TEXTS[0], SamplingParams(n=2, max_tokens=100))
    for _ in range(read):
        next(stream)
    assert llm.engine.has_unfinished() == (read > 0)
    stream.close()
    assert not llm.engine.has_unfinished()


def test_leaving_a_loop_frees_what_it_held(llm_of: MakeLLM) -> None:
    llm: LLM = llm_of("near")
    for piece in llm.stream(TEXTS[0], SamplingParams(max_tokens=100)):
        if piece.token >= 0:
            break
    del piece
    assert not llm.engine.has_unfinished()


def test_a_bad_prompt_is_refused_when_the_stream_is_read(llm_of: MakeLLM) -> None:
    with pytest.raises(RequestError, match="no tokens"):
        next(llm_of().stream("", GREEDY))
