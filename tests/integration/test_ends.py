"""Requests end in the middle of drafts, across tokens and at limits, always where plain decoding ends."""

from __future__ import annotations

from typing import Any

import pytest

from speculant import LLM, CompletionOutput, SamplingParams
from tests.integration.conftest import MakeLLM
from tests.models import END, Shape, write_checkpoint

PROMPTS = ["def read(path):", "class A:", "import os"]
LENGTH = 32
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": LENGTH}
PERFECT = {"draft": "target", "spec_length": 5}  # every draft is accepted whole
ENGINES: list[dict[str, Any]] = [{}, {"draft": "near"}, PERFECT, {"speculative_config": {"method": "ngram"}}]
every_engine = pytest.mark.parametrize("arguments", ENGINES, ids=["plain", "near", "perfect", "ngram"])


def answers(llm: LLM, **values: Any) -> list[CompletionOutput]:
    return [result.outputs[0] for result in llm.generate(PROMPTS, SamplingParams(**{**GREEDY, **values}))]


@pytest.fixture(scope="module")
def kept() -> list[CompletionOutput]:
    """Keep what `full` returns."""
    return []


@pytest.fixture
def full(llm_of: MakeLLM, kept: list[CompletionOutput]) -> list[CompletionOutput]:
    """Return the greedy answers without any stop."""
    if not kept:
        kept.extend(answers(llm_of(), ignore_eos=True))
    return kept


# --- stop strings


@pytest.mark.covering(1)
@every_engine
@pytest.mark.parametrize("place", [1, 7, 8, 9, 10, 20])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_and_tokens_at_one_place(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any], place: int, include: bool
) -> None:
    """Four characters are four tokens here; drafts of five make them fall anywhere in accepted runs (S 23802)."""
    for prompt, whole in zip(PROMPTS, full, strict=True):
        stop = whole.text[place : place + 4]
        params = SamplingParams(**GREEDY, stop=["~never~", stop], include_stop_str_in_output=include, logprobs=0)
        (result,) = llm_of(**arguments).generate(prompt, params)
        (sample,) = result.outputs
        begin = whole.text.index(stop)
        assert sample.text == whole.text[: begin + (4 if include else 0)]
        assert sample.token_ids == whole.token_ids[: begin + 4]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids) == result.metrics.timing.num_tokens


def test_some_stop_strings_end_inside_an_accepted_run(llm_of: MakeLLM, full: list[CompletionOutput]) -> None:
    """With a perfect draft, the last token of most stops is a drafted one: the test above is no weak test."""
    drafted = []
    for place in range(4, 24):
        params = SamplingParams(**GREEDY, stop=full[0].text[place : place + 4])
        drafted.append(list(llm_of(**PERFECT).stream(PROMPTS[0], params))[-1].drafted)
    assert any(drafted)
    assert not all(drafted)


def test_the_stop_that_ends_first_wins(llm_of: MakeLLM, full: list[CompletionOutput]) -> None:
    text = full[0].text
    (sample, *_) = answers(llm_of(**PERFECT), stop=[text[12:16], text[5:14]])
    assert sample.stop_reason == text[5:14]
    assert sample.text == text[:5]


@every_engine
def test_a_stop_string_counts_from_min_tokens_on(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any]
) -> None:
    stop = full[0].text[3:5]
    later = full[0].text.find(stop, 4)
    (sample, *_) = answers(llm_of(**arguments), stop=stop, min_tokens=6, ignore_eos=True)
    assert sample.text == (full[0].text if later < 0 else full[0].text[:later])


def test_an_unused_stop_string_changes_nothing(llm_of: MakeLLM, full: list[CompletionOutput]) -> None:
    half = full[0].text[-3:] + "~never~"  # its beginning is held back until the end
    samples = answers(llm_of("near"), stop=half, ignore_eos=True)
    assert [sample.text for sample in samples] == [whole.text for whole in full]
    assert samples[0].finish_reason == "length"


# --- end tokens


def first_of_its_kind(tokens: list[int], place: int) -> int:
    """Return the first position from `place` on whose token has not occurred before."""
    return next(i for i in range(place, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.covering(1)
@every_engine
@pytest.mark.parametrize("place", range(1, 13, 2))
def test_a_stop_token_inside_a_draft_ends_the_request_there(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any], place: int
) -> None:
    place = first_of_its_kind(full[0].token_ids, place)
    end = full[0].token_ids[place]
    (sample, *_) = answers(llm_of(**arguments), stop_token_ids=[end, 0], ignore_eos=True)
    assert sample.token_ids == full[0].token_ids[: place + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", end)
    assert sample.text == full[0].text[:place], "the text of a stop token is no part of the answer"


@pytest.fixture(scope="module")
def with_common_end(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Write target and draft as usual, but with an end token that comes soon: the letter P, or the usual end."""
    folder = tmp_path_factory.mktemp("ends")
    return (
        write_checkpoint(folder / "target", Shape(end=[END, 47])),
        write_checkpoint(folder / "near", Shape(noise=0.1, end=[END, 47])),
    )


@pytest.mark.parametrize("length", [*(pytest.param(each, marks=pytest.mark.slow) for each in (1, 5)), 3, 8])
def test_the_end_of_sequence_inside_a_draft_is_the_end(
    llm_of: MakeLLM, with_common_end: tuple[str, str], full: list[CompletionOutput], length: int
) -> None:
    """T 47912: also where it is an accepted draft token with others behind it."""
    target, near = with_common_end
    ended = 0
    for draft in (near, target):
        llm = llm_of(model=target, draft_model=draft, spec_length=length)
        for sample, whole in zip(answers(llm), full, strict=True):
            end = whole.token_ids.index(47) if 47 in whole.token_ids else None
            expected = whole.token_ids if end is None else whole.token_ids[: end + 1]
            assert sample.token_ids == expected
            assert sample.finish_reason == ("length" if end is None else "stop")
            assert sample.stop_reason is None, "it is the model's own end token"
            ended += end is not None
    assert ended > 0, "no answer has the end token"


def test_the_end_of_sequence_can_be_ignored(
    llm_of: MakeLLM, with_common_end: tuple[str, str], full: list[CompletionOutput]
) -> None:
    target, near = with_common_end
    samples = answers(llm_of(model=target, draft_model=near), ignore_eos=True)
    assert [sample.token_ids for sample in samples] == [whole.token_ids for whole in full]


@pytest.mark.parametrize("values", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "seeded"])
def test_no_end_is_reported_before_min_tokens(
    llm_of: MakeLLM, with_common_end: tuple[str, str], full: list[CompletionOutput], values: dict[str, Any]
) -> None:
    target, near = with_common_end
    plain = answers(llm_of(model=target), min_tokens=20, **values)
    drafted = answers(llm_of(model=target, draft_model=near), min_tokens=20, **values)
    assert [sample.token_ids for sample in drafted] == [sample.token_ids for sample in plain]
    assert all(len(sample.token_ids) >= 20 for sample in drafted)
    assert all({END, 47}.isdisjoint(sample.token_ids[:20]) for sample in drafted)
    assert values or [sample.token_ids for sample in plain] != [whole.token_ids for whole in full]


# --- limits


@pytest.mark.covering(1)
@every_engine
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7, 13])
def test_max_tokens_is_met_and_never_overshot(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any], max_tokens: int
) -> None:
    samples = answers(llm_of(**arguments), max_tokens=max_tokens, ignore_eos=True)
    assert [sample.token_ids for sample in samples] == [whole.token_ids[:max_tokens] for whole in full]
    assert {sample.finish_reason for sample in samples} == {"length"}


@pytest.mark.covering(1)
@every_engine
@pytest.mark.parametrize("left", [1, 2, 5, 6, 7, 12])
def test_the_context_s_end_is_met_and_never_overshot(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any], left: int
) -> None:
    """V 5342, 24662: near the end the draft shrinks, down to none, and no position is wasted."""
    num_prompt = len(PROMPTS[0])
    llm = llm_of(**arguments, max_model_len=num_prompt + left)
    (result,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert result.outputs[0].token_ids == full[0].token_ids[:left]
    assert result.outputs[0].finish_reason == "length"


def test_a_limit_and_an_end_at_once_are_an_end(llm_of: MakeLLM, full: list[CompletionOutput]) -> None:
    place = first_of_its_kind(full[0].token_ids, 5)
    for values in ({"stop_token_ids": [full[0].token_ids[place]]}, {"stop": full[0].text[place - 1 : place + 1]}):
        (sample, *_) = answers(llm_of(**PERFECT), max_tokens=place + 1, ignore_eos=True, **values)
        assert sample.finish_reason == "stop"


@every_engine
def test_the_text_of_an_end_token_is_left_out(llm_of: MakeLLM, arguments: dict[str, Any]) -> None:
    """As in vLLM: the token stays among the ids."""
    bias = {END: 1000.0}
    for skip, include, text in ((True, False, ""), (True, True, ""), (False, False, ""), (False, True, "<end>")):
        params = SamplingParams(
            temperature=0, logit_bias=bias, skip_special_tokens=skip, include_stop_str_in_output=include
        )
        (result,) = llm_of(**arguments).generate(PROMPTS[0], params)
        assert (result.outputs[0].text, result.outputs[0].token_ids) == (text, [END])
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", None)


@pytest.mark.covering(1)
@every_engine
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_left_out(
    llm_of: MakeLLM, full: list[CompletionOutput], arguments: dict[str, Any], include: bool
) -> None:
    """Streamed pieces join to the same text, wherever in a draft the token falls."""
    llm = llm_of(**arguments)
    for place in range(1, 12, 3):
        stop = full[0].token_ids[place]
        end = full[0].token_ids.index(stop) + 1
        params = SamplingParams(**GREEDY, stop_token_ids=[stop], include_stop_str_in_output=include, stop="~never~")
        pieces = list(llm.stream(PROMPTS[0], params))
        assert [piece.token for piece in pieces] == full[0].token_ids[:end]
        assert pieces[-1].output is not None
        (sample,) = pieces[-1].output.outputs
        assert sample.text == "".join(piece.text for piece in pieces) == full[0].text[: end if include else end - 1]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)


def test_a_beam_s_end_token_is_no_part_of_its_text(llm_of: MakeLLM) -> None:
    for include, text in ((False, ""), (True, "<end>")):
        params = SamplingParams(
            beam_width=2,
            temperature=0,
            logit_bias={END: 1000.0},
            skip_special_tokens=False,
            include_stop_str_in_output=include,
        )
        (result,) = llm_of().generate(PROMPTS[0], params)
        (sample,) = result.outputs
        assert (sample.text, sample.token_ids, sample.stop_reason) == (text, [END], None)
