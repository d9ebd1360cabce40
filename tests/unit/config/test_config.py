"""EngineConfig and its speculative part: defaults, several spellings of one setting, and refused values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from speculant.config import EngineConfig, Limits, SpeculativeConfig, read_bytes, resolve
from speculant.errors import ConfigError

BAD: dict[str, list[Any]] = {
    "dtype": ["float23", "", None],
    "kv_cache_backend": ["page", None],
    "kv_memory": [0, -1, True, "", "lots", "5 XB", "1e9", "-2GB", "1..5GB", "9" * 400, 2.5j, [1]],
    "block_size": [0, -16, 1.5, "16", True, None],
    "scheduling_policy": ["fair", "", None],
    "max_waiting": [0, -1, 1.5, None],
    "max_num_seqs": [0, -1, 1.5, "8", True, None],
    "max_num_batched_tokens": [0, -5, 2.5, 7],  # 7 is below the 8 sequences
    "max_model_len": [0, -1, 1.5],
    "spec_length": [0, -1, 1.5, "5", True],
    "seed": ["x", 1.5, True],
    "speculative_config": [
        *({"method": "m", "num_speculative_tokens": 0}, {"method": "m", 5: 1}),
        *("ngram", [1]),
    ],
    "model": ["", None, 5, ["m"]],
    "draft_model": ["", 5, ["m"], b"m"],
    "use_speculative_decoding": ["off", 0],
    "enable_prefix_caching": ["no", 1, None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_with_a_fix(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{"model": "m", name: value})
    assert caught.value.fix
    assert name in caught.value.problem or "num_speculative_tokens" in caught.value.problem


BAD_SPECULATION: dict[str, list[Any]] = {
    "method": [5, "", ["ngram"], {}, True],
    "model": [5, "", ["m"]],
    "verification": [5, "", None, ["match"], {}],
    "methods": ["ngram", 5, None, [5], [None], [["ngram"]], [""], {"ngram"}],
    "draft_length": [5, ["fixed"], {5: 1}],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_SPECULATION.items() for value in values]
)
def test_a_speculative_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        EngineConfig(model="m", speculative_config={"method": "m", name: value})
    assert caught.value.fix


def test_a_model_may_be_a_path() -> None:
    config = EngineConfig(model=Path("m"), draft_model=Path("d"))  # type: ignore[arg-type]
    assert config.speculative() == SpeculativeConfig(model=Path("d"))  # type: ignore[arg-type]


def test_an_unknown_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'spec_lenght'(?s:.*)did you mean 'spec_length'"):
        EngineConfig.from_arguments(model="m", spec_lenght=3)


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dtype", "bfloat", "bfloat16"),
        ("kv_cache_backend", "pages", "paged"),
        ("scheduling_policy", "decode_first", "decode-first"),
    ],
)
def test_a_choice_is_suggested(name: str, value: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        EngineConfig(model="m", **{name: value})


# --- docs/references.md, configuration


@pytest.mark.parametrize("given", [{}, {"use_speculative_decoding": True}, {"spec_length": 3}])
def test_speculation_is_on_by_default(given: dict[str, Any]) -> None:
    config = EngineConfig(model="m", **given)
    spec = config.speculative()
    assert spec is not None
    assert (spec.method, spec.model) == (None, None)
    assert config.names_speculation is bool(given)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, {"policy": "adaptive"}),
        ({"num_speculative_tokens": 3}, {"policy": "fixed"}),
        ({"model": "d"}, {"policy": "adaptive"}),
        ({"method": "m"}, {"policy": "adaptive"}),
        ({"num_speculative_tokens": 3, "draft_length": "adaptive"}, {"policy": "adaptive"}),
        ({"draft_length": {"policy": "mine", "key": 1}}, {"policy": "mine", "key": 1}),
        ({"draft_length": {"key": 1}}, {"policy": "fixed", "key": 1}),
    ],
)
def test_draft_length_is_adaptive_by_default(given: dict[str, Any], policy: dict[str, Any]) -> None:
    assert SpeculativeConfig(**given).policy == policy


@pytest.mark.parametrize("length", [0, -3])
def test_a_draft_has_at_least_one_token(length: int) -> None:
    with pytest.raises(ConfigError, match=f"spec_length={length} is not a whole number above 0") as caught:
        EngineConfig(model="m", draft_model="d", spec_length=length)
    assert caught.value.fix == "set spec_length to 1 or more."
    assert EngineConfig(model="m", draft_model="d", spec_length=1).spec_length == 1


def test_arguments_of_other_engines_are_unknown() -> None:
    """Batching is always continuous, so there are no arguments for batching modes."""
    for name in ("batching_mode", "use_cuda_graphs"):
        with pytest.raises(ConfigError, match=f"unknown engine argument '{name}'"):
            EngineConfig.from_arguments(model="m", **{name: "continuous"})


def test_a_step_has_a_token_for_each_running_sequence() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=4 is below max_num_seqs=5") as caught:
        EngineConfig(model="m", max_num_seqs=5, max_num_batched_tokens=4)
    assert "every running sequence needs a token per step" in caught.value.fix


# --- sizes in memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (" 64 kb ", 64_000),
        ("3KiB", 3072),
        ("7B", 7),
        ("1MB", 10**6),
    ],
)
def test_sizes_are_read_in_every_form(text: int | str, size: int) -> None:
    assert read_bytes("kv_memory", text) == size
    assert EngineConfig(model="m", kv_memory=text).kv_memory_bytes() == size


@pytest.mark.parametrize("value", [None, "auto"])
def test_without_a_size_the_engine_chooses(value: str | None) -> None:
    assert EngineConfig(model="m", kv_memory=value).kv_memory_bytes() is None


@pytest.mark.parametrize("name", ["prompt_cache", "learn"])
def test_what_can_be_no_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for given, says in (
        (tmp_path / "file", "is no folder"),
        (tmp_path / "file" / "in", "is no folder"),
        ("~nobody-1/x", "no user"),
    ):
        with pytest.raises(ConfigError, match=says):
            EngineConfig("demo", **{name: given})
    EngineConfig("demo", **{name: tmp_path / "new" / "folder"})


def test_an_invalid_size_is_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match="kv_memory='2 gigs' is not a size") as caught:
        EngineConfig(model="m", kv_memory="2 gigs")
    assert "512MiB" in caught.value.fix


# --- one setting, several spellings


@pytest.mark.parametrize("draft", [{"draft_model": "d"}, {"speculative_config": {"method": "m"}}])
@pytest.mark.parametrize("switch", [None, True])
def test_speculation_is_on_when_there_is_a_drafter(draft: dict[str, Any], switch: bool | None) -> None:
    assert EngineConfig(model="m", use_speculative_decoding=switch, **draft).speculative() is not None


def test_speculation_can_be_switched_off() -> None:
    config = EngineConfig(model="m", draft_model="d", spec_length=3, use_speculative_decoding=False)
    assert config.speculative() is None


def test_three_spellings_give_one_configuration() -> None:
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
def test_two_values_for_one_setting_are_refused(arguments: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError, match="given twice") as caught:
        EngineConfig(model="m", **arguments)
    assert all(word in caught.value.problem for word in named)


def test_the_same_value_twice_is_accepted() -> None:
    config = EngineConfig(
        model="m", draft_model="d", spec_length=3, speculative_config={"model": "d", "num_speculative_tokens": 3}
    )
    assert config.speculative() == SpeculativeConfig(model="d", num_speculative_tokens=3)


def test_other_keys_are_the_method_s_options() -> None:
    config = EngineConfig(model="m", speculative_config={"method": "x", "verification": "match", "max_order": 3})
    assert config.speculative() == SpeculativeConfig(method="x", verification="match", options={"max_order": 3})


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").seed = 3


@pytest.mark.parametrize(
    ("asked", "positions", "expected"),
    [(None, 100, 100), (None, 10**6, 10**6), (60, 100, 60), (100, 100, 100), (10**5, 10**6, 10**5)],
)
def test_the_context_is_resolved(asked: int | None, positions: int, expected: int) -> None:
    config = EngineConfig(model="m", max_model_len=asked, max_num_seqs=3, max_num_batched_tokens=9)
    assert resolve(config, positions) == Limits(expected, 3, 9)


def test_limits_are_the_configured_ones() -> None:
    config = EngineConfig(model="m", max_waiting=7, scheduling_policy="first-come")
    assert resolve(config, 100) == Limits(100, 8, 512, 7, "first-come")


@pytest.mark.parametrize(
    ("rows", "positions", "expected", "source"),
    [(None, 100, 512, 100), (None, 1000, 1007, 1000), (None, 2**15, 4103, 4096), (600, 2**15, 600, 593)],
)
def test_rows_suffice_for_a_usual_source(rows: int | None, positions: int, expected: int, source: int) -> None:
    """A source is encoded in one pass, which leaves a row for each of the 7 other sequences."""
    limits = resolve(EngineConfig(model="m", max_num_batched_tokens=rows), positions, has_source=True)
    assert (limits.max_num_batched_tokens, limits.max_source_len) == (expected, source)


def test_the_engine_s_defaults() -> None:
    config = EngineConfig(model="m")
    assert (config.kv_cache_backend, config.enable_prefix_caching, config.block_size) == ("paged", True, 16)
    assert (config.scheduling_policy, config.max_waiting, config.kv_memory) == ("decode-first", 1024, None)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"101(?s:.*)100"):
        resolve(EngineConfig(model="m", max_model_len=101), 100)
