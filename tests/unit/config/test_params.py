"""SamplingParams: values that are refused, with a fix, and values that are converted."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from speculant.errors import ConfigError
from speculant.params import (
    FOREIGN,
    MAX_BAD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    SamplingParams,
)
from tests.whole_numbers import WRONG, places

NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[Any]] = {
    "n": [0, -1, MAX_N + 1, 1.5, "2", None, True],
    "structured_outputs": [3, "json", [], {}, {"jsn": {}}, {"regex": 3}, {"json": {}, "regex": "a"}],
    "temperature": [-0.1, 101, NAN, INF, "hot", None, 1e-12],
    "top_k": [-2, 2**31, 2**64 + 1, 1.5, NAN, INF, None],
    "top_p": [0, -0.5, 1.5, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, 1e-300, 101, NAN],
    "presence_penalty": [-101, 101, NAN, None],
    "frequency_penalty": [-101, 101, NAN],
    "logit_bias": [
        {"a": 1.0},
        {0: NAN},
        {0: INF},
        {0: 1e39},
        {0: "x"},
        {0: 10**400},
        {INF: 1.0},
        {5.0: 1.0},
        {5.9: 1.0},
        {"5.0": 1.0},
        {"1_0": 1.0},
        {True: 1.0},
        {0: True},
        {0: None},
        [1.0],
        3,
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0),
    ],
    "seed": [1.5, "x", -(2**63) - 1, 2**64, True],
    "max_tokens": [0, -1, 2**64, 1.5, INF, "many"],
    "min_tokens": [-1, 2**64, 17, 0.5, None],  # 17 is above the default of max_tokens
    "stop": [[""], "", ["a", 3], 3, ["x"] * (MAX_STOPS + 1), "x" * (MAX_STOP_CHARACTERS + 1)],
    "stop_token_ids": [3, [True], [5.0], ["5"], [None], [[5]], range(MAX_STOP_TOKEN_IDS + 1)],
    "include_stop_str_in_output": ["no", None, 1],
    "ignore_eos": ["false", None],
    "skip_special_tokens": ["true"],
    "logprobs": [-2, 2**31, 0.5],
    "prompt_logprobs": [-2, 2**31, "all"],
    "speculation": [
        "off",
        3,
        {"methd": "other"},
        {"method": 3},
        {"num_speculative_tokens": 513},
        {"num_speculative_tokens": -1},
        {"num_speculative_tokens": "3"},
        {"num_speculative_tokens": 1.5},
        {"num_speculative_tokens": None},
        {"verification": None},
    ],
    "beam_width": [0, -1, MAX_N + 1, 2.0, "2", True],
    "bad_words": [
        "word",
        [""],
        [["a"]],
        [[[1]]],
        [[]],
        3,
        [3],
        ["x"] * (MAX_BAD_WORDS + 1),
        ["x" * (MAX_BAD_CHARACTERS + 1)],
    ],
    "allowed_token_ids": [[], 3],
    "detokenize": [None, 1],
    "truncate_prompt_tokens": [0, -2, 1.5, 2**31],
    "length_penalty": [-11, 11, NAN, None, "long", 0.5],  # 0.5 needs a beam search, and there is none
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_a_fix(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.fix
    words = {"speculation": "spec|verification|method"}.get(name, name)
    assert any(word in caught.value.problem for word in words.split("|"))


@pytest.mark.parametrize("name", places())
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_whole_number_is_neither_a_truth_value_nor_a_fraction(name: str, value: Any) -> None:
    if name == "bad_words" and isinstance(value, str):
        return  # a word, letter by letter
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: places()[name](value)})


def test_all_settings_with_whole_numbers_are_found() -> None:
    assert set(places()) == {
        "n", "top_k", "logit_bias", "seed", "max_tokens", "min_tokens", "stop_token_ids", "logprobs",
        "prompt_logprobs", "beam_width", "bad_words", "allowed_token_ids", "truncate_prompt_tokens",
    }  # fmt: skip


def test_numpy_s_whole_numbers_and_digits_are_keys_of_a_bias() -> None:
    assert dict(SamplingParams(logit_bias={np.int64(5): 1, "7": 2.0}).logit_bias) == {5: 1.0, 7: 2.0}


def test_every_parameter_has_a_bad_value_above() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'temprature'(?s:.*)did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1.0})  # which calls the class
    with pytest.raises(ConfigError, match=r"'methd'(?s:.*)did you mean 'method'"):
        SamplingParams(speculation={"methd": "x"})


@pytest.mark.parametrize("name", FOREIGN)
def test_vllm_s_parameters_change_nothing_or_are_refused(name: str) -> None:
    harmless, why, fix = FOREIGN[name]
    for value in harmless:
        assert SamplingParams(**{name: value}) == SamplingParams()
    if why:
        with pytest.raises(ConfigError, match=f"{name}='else' is not supported: {why}") as caught:
            SamplingParams(**{name: "else"})
        assert caught.value.fix == fix


def test_a_clone_is_an_equal_copy() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, bad_words=["x", [1, 2]], structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params.clone() == params
    assert params.clone() is not params


def test_none_is_the_default_of_optional_values() -> None:
    assert SamplingParams.from_optional(n=None, top_p=None, seed=3) == SamplingParams(seed=3)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None


def test_stop_strings_need_text() -> None:
    with pytest.raises(ConfigError, match=r"detokenize=False(?s:.*)stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"stop": "x"},
        {"logprobs": 0},
        {"bad_words": ["x"]},
        {"allowed_token_ids": [1]},
        {"speculation": {"verification": "match"}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_beam_search_refuses_useless_settings(asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(ConfigError, match=rf"{name}=.* can't be combined with beam_width=3(?s:.*)leave out {name}"):
        SamplingParams(beam_width=3, **asked)
    SamplingParams(**asked)


def test_a_beam_search_returns_at_most_its_width() -> None:
    with pytest.raises(ConfigError, match="n=4 is above beam_width=3"):
        SamplingParams(beam_width=3, n=4)


def test_a_beam_search_accepts_the_other_settings() -> None:
    SamplingParams(beam_width=3, n=3, temperature=0, top_k=-1, seed=1, length_penalty=-0.5)
    SamplingParams(beam_width=MAX_N, repetition_penalty=1.1, min_tokens=3, stop_token_ids=[1], prompt_logprobs=1)
    SamplingParams(beam_width=1, speculation={"num_speculative_tokens": 2, "verification": "auto"})
    SamplingParams(beam_width=1, speculation=False, length_penalty=10)


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(n=MAX_N, temperature=100, top_p=1, min_p=1, logprobs=MAX_LOGPROBS, prompt_logprobs=0)
    SamplingParams(n=1, temperature=1e-10, top_p=1e-9, min_p=0, repetition_penalty=100, presence_penalty=-100)
    SamplingParams(max_tokens=None, min_tokens=10**9, seed=2**64 - 1, stop=["x"] * MAX_STOPS)
    SamplingParams(stop=["x" * (MAX_STOP_CHARACTERS // MAX_STOPS)] * MAX_STOPS)
    SamplingParams(max_tokens=16, min_tokens=16, seed=-(2**63), logit_bias={0: -INF, 1: 1e6})
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))


def test_other_spellings_are_accepted() -> None:
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()
    assert SamplingParams(logit_bias={"5": 1}).logit_bias == {5: 1.0}
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_a_setting_can_be_changed_and_is_checked() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={1: 2.0})
    kept = params.clone()
    assert (params.greedy, params.edits) == (True, True)
    params.temperature, params.stop, params.logit_bias = 0.5, "x", {}
    assert params == SamplingParams(temperature=0.5, stop=["x"])
    assert (params.greedy, params.edits) == (False, False)
    assert kept == params.clone(temperature=0.0, stop=(), logit_bias={1: 2.0})
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        params.max_tokns = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="top_p=2 is not"):
        params.top_p = 2
    assert params.top_p == 1


def test_parameters_do_not_share_what_they_are_made_from() -> None:
    bias, stop, ids, wishes = {1: 1.0}, ["x"], [1], {"num_speculative_tokens": 2}
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids, speculation=wishes)
    bias[2], wishes["num_speculative_tokens"] = 2.0, 9
    stop.append("y")
    ids.append(2)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 1.0}, ("x",), (1,))
    assert params.speculation == {"num_speculative_tokens": 2}
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0


def test_parameters_can_be_pickled() -> None:
    """Also copied, and with one value replaced."""
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, stop=["x"], speculation={"verification": "auto"})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=3) == SamplingParams(
        n=3, temperature=0.5, logit_bias={1: 2.0}, stop=["x"], speculation={"verification": "auto"}
    )


@pytest.mark.parametrize(
    ("values", "penalised"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, False),
    ],
)
def test_penalties_depend_on_the_history(values: dict[str, Any], penalised: bool) -> None:
    assert SamplingParams(**values).penalised is penalised
    assert SamplingParams(**values).greedy is (values.get("temperature") == 0)
