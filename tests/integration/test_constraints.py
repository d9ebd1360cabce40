"""A constraint over whole models, on every backend: the same text with and without drafts, and all of it allowed."""

from __future__ import annotations

from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.errors import ConfigError, RequestError
from speculant.kernels import usable_sets
from tests.automata import Automaton, AutomatonConstraint
from tests.examples import examples
from tests.integration.conftest import MakeLLM

LETTERS, DIGITS = range(65, 91), range(48, 58)
TWO_AND_ONE = Automaton(
    {0: dict.fromkeys(LETTERS, 1), 1: dict.fromkeys(LETTERS, 2), 2: dict.fromkeys([*DIGITS, 200, 300], 0)}
)
ON: dict[str, dict[str, Any]] = {"reference": {"dtype": "float64", "kernels": "reference"}}
if usable_sets():
    ON["native"] = {"dtype": "float32", "kernels": "native"}
DRAFTS: list[dict[str, Any]] = [
    {"draft": "near", "spec_length": 4},
    {"draft": "near", "speculative_config": {"tree": [2, 2]}},
    {"speculative_config": {"method": "ngram"}},
]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {70: 1.5}},
    {"seed": 3},
    {"seed": 4, "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.4, "min_tokens": 8},
]


def constrained(llm: LLM, settings: dict[str, Any], name: str) -> list[int]:
    """Run a constrained request beside a free one; return its output."""
    params = SamplingParams(max_tokens=30, **settings)
    (request,) = llm.engine.add_request([70, 71, 72], params, name, constraint=TWO_AND_ONE.constrain)
    (other,) = llm.engine.add_request([70, 71, 72], params, name + " free")
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert (request.ending.error, other.ending.error) == (None, None)
    assert isinstance(request.constraint, AutomatonConstraint)
    assert request.constraint.taken == request.output
    assert other.output != request.output
    return request.output


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("backend", ON)
def test_drafts_change_no_constrained_text(
    llm_of: MakeLLM, backend: str, drafts: dict[str, Any], settings: dict[str, Any]
) -> None:
    plain = constrained(llm_of(**ON[backend]), settings, f"plain {drafts}")
    assert constrained(llm_of(**ON[backend], **drafts), settings, "drafted") == plain
    assert len(plain) == 30
    assert all(token in LETTERS for place, token in enumerate(plain) if place % 3 < 2)


@pytest.mark.parametrize("backend", ON)
def test_a_constrained_draft_is_accepted(llm_of: MakeLLM, backend: str) -> None:
    llm = llm_of(draft="near", spec_length=4, **ON[backend])
    params = SamplingParams(temperature=0, max_tokens=30)
    (request,) = llm.engine.add_request([70, 71, 72], params, "r", constraint=TWO_AND_ONE.constrain)
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert request.metrics.speculative_decoding.num_accepted_draft_tokens > 10


# --- banned words, allowed tokens and the other settings in vLLM's names


TEXTS = ["one and two", "zwei und drei"]
CHOICES: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 0.7, "top_p": 0.9}]


def outputs(llm: LLM, **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=examples(40, least=20), **settings)
    return [result.outputs[0].token_ids for result in llm.generate(TEXTS, params)]


def has(tokens: list[int], word: list[int]) -> bool:
    return any(tokens[place : place + len(word)] == word for place in range(len(tokens)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("backend", ON)
def test_a_banned_word_never_comes_with_or_without_drafts(
    llm_of: MakeLLM, backend: str, drafts: dict[str, Any], settings: dict[str, Any]
) -> None:
    plain, drafted = llm_of(**ON[backend]), llm_of(**ON[backend], **drafts)
    free = outputs(plain, **settings)
    single, pair = free[0][0], free[1][3:5]
    words = [plain.tokenizer.decode([single]), pair]
    found = outputs(plain, bad_words=words, **settings)
    assert found != free
    assert outputs(drafted, bad_words=words, **settings) == found
    assert not any(has(tokens, [single]) or has(tokens, pair) for tokens in found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("backend", ON)
def test_only_allowed_tokens_come(llm_of: MakeLLM, backend: str, settings: dict[str, Any]) -> None:
    plain, drafted = llm_of(**ON[backend]), llm_of(**ON[backend], **DRAFTS[0])
    found = outputs(plain, allowed_token_ids=range(50, 60), **settings)
    assert {token for tokens in found for token in tokens} <= set(range(50, 60))
    assert outputs(drafted, allowed_token_ids=range(50, 60), **settings) == found


def test_banned_words_hold_within_a_form(llm_of: MakeLLM) -> None:
    form, llm = {"regex": "(aa|b|c){6}"}, llm_of("near")
    params = SamplingParams(seed=1, max_tokens=20, structured_outputs=form, bad_words=["a", "bb"])  # type: ignore[arg-type]
    text = llm.generate(TEXTS[0], params)[0].outputs[0].text
    assert len(text) == 6
    assert "a" not in text
    assert "bb" not in text


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bad_words": [[10**6]]}, "bad_words has 1000000"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids has -1"),
    ],
    ids=str,
)
def test_ids_that_are_no_tokens_are_refused(llm_of: MakeLLM, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm_of("near").generate(TEXTS, SamplingParams(**settings))


def test_settings_that_ban_every_token_are_explained(llm_of: MakeLLM) -> None:
    params = SamplingParams(allowed_token_ids=[70], bad_words=[[70]])
    with pytest.raises(RequestError, match="no token is possible: all are banned by .*bad_words"):
        llm_of("near").generate(TEXTS[0], params)


def test_without_detokenizing_an_output_has_no_text(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    (plain,), (silent,) = (
        llm.generate(TEXTS[0], SamplingParams(temperature=0, detokenize=each))[0].outputs for each in (True, False)
    )
    assert (silent.text, silent.token_ids) == ("", plain.token_ids)
    assert plain.text


def test_a_prompt_is_truncated_to_its_end(llm_of: MakeLLM) -> None:
    llm = llm_of("near")
    (result,) = llm.generate([list(range(1, 10))], SamplingParams(truncate_prompt_tokens=3, temperature=0))
    assert result.prompt_token_ids == [7, 8, 9]
    most = llm.limits.max_model_len
    (result,) = llm.generate([[1, 2] * most], SamplingParams(truncate_prompt_tokens=-1, max_tokens=20, temperature=0))
    assert len(result.prompt_token_ids) == most - 20
    assert len(result.outputs[0].token_ids) == 20


def test_all_log_probabilities_come_where_the_engine_allows(llm_of: MakeLLM) -> None:
    llm = llm_of("near", max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    (result,) = llm.generate([[7, 8, 9]], params)
    size = llm.engine._context.target.vocab_size
    assert result.prompt_logprobs is not None
    entries = [*(result.outputs[0].logprobs or ()), *result.prompt_logprobs[1:]]
    assert [len(entry or ()) for entry in entries] == [size] * 5
    assert sorted(value.rank for value in entries[0].values()) == list(range(1, size + 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_log_probabilities_than_allowed_are_refused(llm_of: MakeLLM, name: str) -> None:
    for asked, most in ((-1, 100), (101, 100), (4, 3)):
        llm = llm_of("near") if most == 100 else llm_of("near", max_logprobs=most)
        with pytest.raises(ConfigError, match=rf"{name}={asked} is not a number from 0 to {most}(?s:.*)max_logprobs"):
            llm.generate([TEXTS[0]], SamplingParams(**{name: asked}))
