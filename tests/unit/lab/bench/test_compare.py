"""The ways that are compared, and their engines."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.config import EngineConfig
from speculant.errors import ConfigError, SpeculantError
from speculant.lab.bench import (
    Setting,
    build_ways,
    compared_conclusions,
    configured,
    fastest_way,
    settings,
    usual_settings,
)
from speculant.params import SamplingParams
from tests.models import Checkpoints

PAIR = EngineConfig("target", "draft")


def test_every_method_has_every_length_then_settings() -> None:
    found = settings(
        ["ngram", "suffix"], [2, 4], [{"verification": "block"}, {"method": "merge", "draft_quantization": "int8"}]
    )
    assert [each.name for each in found] == [
        "ngram, length 2", "ngram, length 4", "suffix, length 2", "suffix, length 4", "verification=block",
        "merge, draft_quantization=int8",
    ]  # fmt: skip
    assert found[1].values == {"method": "ngram", "num_speculative_tokens": 4}
    assert settings(["ngram"], [], []) == [Setting("ngram", {"method": "ngram"})]
    assert settings([], [3], []) == [Setting("length 3", {"num_speculative_tokens": 3})]
    assert settings([], [], []) == []
    assert settings([], [], [{}]) == [Setting("default", {})]


@pytest.mark.parametrize(
    "named",
    [
        (["ngram", "ngram"], [], []),
        ([], [2, 2], []),
        (["ngram"], [], [{"method": "ngram"}]),
        ([], [], [{"method": "plain"}]),
    ],
)
def test_a_way_that_is_named_twice_is_refused(named: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ConfigError, match="named twice"):
        settings(*named)


def test_usual_ways_need_no_missing_model() -> None:
    alone, pair = usual_settings(EngineConfig("target")), usual_settings(PAIR)
    assert alone[0] == pair[0] == Setting("default", {})
    assert [each.values["method"] for each in alone[1:]] == ["suffix", "prompt_lookup"]
    assert [each.values["method"] for each in pair if each not in alone] == ["draft_model"]
    for each in pair:
        configured(PAIR, each.values)


def test_a_method_without_a_model_gets_none() -> None:
    assert configured(PAIR, {"method": "suffix"}).draft_model is None
    assert configured(PAIR, {"method": "merge"}).draft_model == "draft"
    assert configured(PAIR, {"num_speculative_tokens": 3}).draft_model == "draft"
    other = configured(PAIR, {"method": "draft_model", "model": "smaller"})
    assert other.draft_model == "smaller"


def test_values_replace_those_of_the_engine() -> None:
    config = EngineConfig("target", "draft", spec_length=5)
    assert configured(config, {"num_speculative_tokens": 2}).speculative().num_speculative_tokens == 2
    assert configured(config, {"method": "suffix"}).speculative().num_speculative_tokens == 5
    assert configured(config, {"draft_quantization": "int8"}).draft_quantization == "int8"


def test_options_of_another_method_are_left_out() -> None:
    config = EngineConfig("target", speculative_config={"model": "draft", "tree": [2, 1], "verification": "match"})
    kept = configured(config, {"num_speculative_tokens": 2}).speculative()
    assert kept.options == {"tree": [2, 1]}
    other = configured(config, {"method": "draft_model"}).speculative()
    assert (other.options, other.model, other.verification) == ({}, "draft", "match")


def test_ways_share_the_weights_and_nothing_else(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near, dtype="float64", max_num_seqs=1)
    ways = build_ways(config, settings(["suffix"], [], []) + settings([], [2], []), SamplingParams(), sequential=True)
    assert list(ways) == ["plain", "suffix", "length 2"]
    runtimes = [way.bench.runtime for way in ways.values()]
    assert len({id(runtime.checkpoint) for runtime in runtimes}) == 1
    assert len({id(runtime.engine) for runtime in runtimes}) == 3
    assert [runtime.drafting for runtime in runtimes] == [False, True, True]
    assert runtimes[2].speculation.startswith("draft_model, 2 tokens a step")
    assert all(way.mode.sequential for way in ways.values())


@pytest.mark.parametrize(
    ("config", "params"),
    [({"use_speculative_decoding": False}, {}), ({}, {"speculation": False})],
)
def test_nothing_is_compared_with_speculation_off(
    checkpoints: Checkpoints, config: dict[str, Any], params: dict[str, Any]
) -> None:
    engine = EngineConfig(checkpoints.target, **config)
    with pytest.raises(ConfigError, match="switched off"):
        build_ways(engine, [Setting("default", {})], SamplingParams(**params), sequential=True)


def test_a_setting_that_no_engine_has_is_explained(checkpoints: Checkpoints) -> None:
    config = EngineConfig(checkpoints.target, checkpoints.near)
    for values in ({"method": "sufix"}, {"method": "suffix", "tree": [1]}, {"verification": "exact"}):
        with pytest.raises(SpeculantError):
            build_ways(config, [Setting("wrong", values)], SamplingParams(), sequential=True)


def a_case(**speeds: float) -> dict[str, Any]:
    """Return a case of ways with these speeds between tokens, whose quartiles are 0.1 away."""
    spreads = {way: {"q1": speed - 0.1, "median": speed, "q3": speed + 0.1} for way, speed in speeds.items()}
    return {
        "gains": {way: {"measured_speed": spread} for way, spread in spreads.items()},
        "ratios": {f"{way}/plain": {"tokens_per_s": spread} for way, spread in spreads.items()},
    }


def test_the_fastest_way_is_named_with_those_close_to_it() -> None:
    case = a_case(slow=1.1, fast=2.0, close=1.85)
    assert fastest_way(case) == "fast"
    said = list(compared_conclusions(case))
    assert said[0] == "fastest: fast, 2.00 (1.90-2.10) times the speed of plain decoding between tokens"
    assert said[1] == "its quartiles overlap with those of close: the order is not certain"
    assert len(list(compared_conclusions(a_case(slow=1.1, fast=2.0)))) == 1


def test_nothing_is_fastest_if_plain_decoding_is() -> None:
    case = a_case(one=0.9, other=0.99)
    assert fastest_way(case) == "plain"
    assert list(compared_conclusions(case)) == ["no way is faster than plain decoding"]
