"""EngineConfig and its speculative part: seed 001's rules, three spellings of one thing, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from speculant.config import DEFAULT_CONTEXT, EngineConfig, Limits, SpeculativeConfig, resolve
from speculant.errors import ConfigError

BAD: dict[str, list[Any]] = {
    "dtype": ["float23", "", None],
    "kernels": ["fast"],
    "kv_cache_backend": ["page"],
    "max_num_seqs": [0, -1, 1.5, "8", True, None],
    "max_num_batched_tokens": [0, -5, 2.5, 7, None],  # 7 is below the 8 sequences
    "max_model_len": [0, -1, 1.5],
    "spec_length": [0, -1, 1.5, "5", True],
    "seed": ["x", 1.5, None, True],
    "speculative_config": [{"num_speculative_tokens": 3}, {"method": "m", "num_speculative_tokens": 0}, "ngram", [1]],
    "use_speculative_decoding": [True],  # with nothing to draft with
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_a_fix(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **{name: value})
    assert caught.value.fix
    assert name in caught.value.problem or "num_speculative_tokens" in caught.value.problem


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'spec_lenght'(?s:.*)did you mean 'spec_length'"):
        EngineConfig.from_arguments(model="m", spec_lenght=3)


def test_a_choice_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean 'bfloat16'"):
        EngineConfig(model="m", dtype="bfloat")


@pytest.mark.parametrize("draft", [{"draft_model": "d"}, {"speculative_config": {"method": "m"}}])
@pytest.mark.parametrize("switch", [None, True])
def test_speculation_is_on_when_there_is_something_to_draft_with(draft: dict[str, Any], switch: bool | None) -> None:
    assert EngineConfig(model="m", use_speculative_decoding=switch, **draft).speculative() is not None


def test_speculation_can_be_switched_off_and_says_so() -> None:
    config = EngineConfig(model="m", draft_model="d", spec_length=3, use_speculative_decoding=False)
    assert config.speculative() is None
    assert "use_speculative_decoding" in config.why_not_speculative()
    assert EngineConfig(model="m").speculative() is None
    assert "draft_model" in EngineConfig(model="m").why_not_speculative()


def test_the_three_spellings_are_one() -> None:
    by_seed_names = EngineConfig(model="m", draft_model="d", spec_length=3)
    in_one = EngineConfig(model="m", speculative_config={"model": "d", "num_speculative_tokens": 3})
    mixed = EngineConfig(model="m", draft_model="d", speculative_config={"num_speculative_tokens": 3})
    expected = SpeculativeConfig(model="d", num_speculative_tokens=3)
    assert by_seed_names.speculative() == in_one.speculative() == mixed.speculative() == expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"draft_model": "d", "speculative_config": {"model": "e"}}, ["model", "'d'", "'e'"]),
        ({"draft_model": "d", "spec_length": 3, "speculative_config": {"num_speculative_tokens": 4}}, ["3", "4"]),
    ],
)
def test_two_different_values_for_one_thing_are_refused(arguments: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError, match="given twice") as caught:
        EngineConfig(model="m", **arguments)
    assert all(word in caught.value.problem for word in named)


def test_the_same_value_twice_is_no_contradiction() -> None:
    config = EngineConfig(
        model="m", draft_model="d", spec_length=3, speculative_config={"model": "d", "num_speculative_tokens": 3}
    )
    assert config.speculative() == SpeculativeConfig(model="d", num_speculative_tokens=3)


def test_keys_that_are_not_ours_are_the_method_s_options() -> None:
    config = EngineConfig(model="m", speculative_config={"method": "x", "verification": "match", "max_order": 3})
    assert config.speculative() == SpeculativeConfig(method="x", verification="match", options={"max_order": 3})


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 3


@pytest.mark.parametrize(
    ("asked", "positions", "expected"),
    [(None, 100, 100), (None, 10**6, DEFAULT_CONTEXT), (60, 100, 60), (100, 100, 100), (10**5, 10**6, 10**5)],
)
def test_the_context_is_resolved(asked: int | None, positions: int, expected: int) -> None:
    config = EngineConfig(model="m", max_model_len=asked, max_num_seqs=3, max_num_batched_tokens=9)
    assert resolve(config, positions) == Limits(expected, 3, 9)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"101(?s:.*)100"):
        resolve(EngineConfig(model="m", max_model_len=101), 100)
