"""Flags: one for every field, parsed to the field's type."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from contextlib import suppress
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from speculant.cli import (
    NEW_TOKENS,
    EngineFlags,
    FlagGroup,
    LinePrinter,
    SamplingFlags,
    ServerFlags,
    accepts_flags,
    parse_mapping,
    parse_speculation,
)
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.params import SamplingParams
from speculant.serving import ServerOptions
from speculant.structured import StructuredOutputs


def _run(*arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Parse arguments through typer and return the values that a command receives."""
    received: dict[str, Any] = {}

    @accepts_flags
    def command(word: Annotated[str, typer.Argument()], *, sampling: SamplingFlags, engine: EngineFlags) -> None:
        received.update(word=word, sampling=sampling, engine=engine)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, ["hello", *arguments], env=env, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return received


@pytest.mark.parametrize(("group", "source"), [(SamplingFlags, SamplingParams), (EngineFlags, EngineConfig)])
def test_fields_and_flags_match(group: type[FlagGroup], source: type) -> None:
    assert set(group.names()) == {field.name for field in dataclasses.fields(source)}


def test_every_flag_has_help() -> None:
    for group in (SamplingFlags, EngineFlags):
        assert all(parameter.annotation.__metadata__[0].help for parameter in group.parameters())


def test_flags_that_are_not_given_keep_the_library_default() -> None:
    received = _run()
    assert received["word"] == "hello"
    assert received["engine"].given == {}
    assert received["sampling"].params() == SamplingParams(max_tokens=NEW_TOKENS)


def test_every_sampling_field_is_passed_on() -> None:
    arguments = """--n 2 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1
        --presence-penalty 0.2 --frequency-penalty 0.3 --logit-bias 5=-inf,6=1.5 --seed 3 --max-tokens 9
        --min-tokens 2 --stop a --stop b --stop-token-ids 1 --stop-token-ids 2 --include-stop-str-in-output
        --ignore-eos --logprobs 1 --prompt-logprobs 0 --no-skip-special-tokens --speculation off
        --structured-outputs regex=a+ --bad-words x --bad-words y --allowed-token-ids 4 --allowed-token-ids 5
        --truncate-prompt-tokens 8"""
    params = _run(*arguments.split())["sampling"].params()
    assert params == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: float("-inf"), 6: 1.5},
        seed=3,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        include_stop_str_in_output=True,
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0,
        skip_special_tokens=False,
        speculation=False,
        structured_outputs=StructuredOutputs(regex="a+"),
        bad_words=["x", "y"],
        allowed_token_ids=[4, 5],
        truncate_prompt_tokens=8,
    )
    silent = _run("--no-detokenize")["sampling"].params()  # goes with no stop strings
    beams = _run("--beam-width", "4", "--length-penalty", "0.5", "--max-tokens", "16")["sampling"].params()
    assert beams == SamplingParams(beam_width=4, length_penalty=0.5)  # goes with few of the others
    moved = _moved(params) | _moved(beams) | _moved(silent)
    assert moved == set(SamplingFlags.names()), "the test must move every field off its default"


def _moved(params: SamplingParams) -> set[str]:
    return {f.name for f in dataclasses.fields(params) if getattr(params, f.name) != getattr(SamplingParams(), f.name)}


def test_a_beam_search_ignores_the_checkpoint_s_sampling() -> None:
    advice = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert _run("--top-k", "3")["sampling"].params(advice).temperature == 0.6
    assert _run("--beam-width", "2")["sampling"].params(advice) == SamplingParams(beam_width=2, max_tokens=NEW_TOKENS)


def test_engine_flags_become_arguments() -> None:
    engine = _run("--model", "m", "--spec-length", "3", "--engine-seed", "5", "--no-use-speculative-decoding")["engine"]
    assert engine.values() == {"model": "m", "spec_length": 3, "seed": 5, "use_speculative_decoding": False}


@pytest.mark.parametrize("name", EngineFlags.names())
def test_every_engine_option_reads_its_environment_variable(name: str) -> None:
    kind = inspect.get_annotations(EngineFlags, eval_str=True)[name].__origin__
    text, value = {str: ("abc", "abc"), int: ("7", 7), bool: ("1", True)}[kind]
    assert _run(env={f"SPECULANT_{name.upper()}": text})["engine"].given == {name: value}


def test_a_flag_overrides_its_environment_variable() -> None:
    assert _run("--dtype", "float64", env={"SPECULANT_DTYPE": "float32"})["engine"].given == {"dtype": "float64"}


def test_request_and_engine_have_separate_seeds() -> None:
    received = _run("--seed", "1", "--engine-seed", "2")
    assert received["sampling"].given == {"seed": 1}
    assert received["engine"].given == {"seed": 2}


def test_a_missing_model_is_explained() -> None:
    with pytest.raises(ConfigError, match="--model demo --draft-model demo"):
        EngineFlags(dict.fromkeys(["engine_seed", *EngineFlags.names()])).values()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"method": "x", "order": [1, 2]}', {"method": "x", "order": [1, 2]}),
        ("method=x, num_speculative_tokens=4", {"method": "x", "num_speculative_tokens": 4}),
        ("a=true,b=0.5,c=", {"a": True, "b": 0.5, "c": ""}),
    ],
)
def test_mappings_have_two_spellings(text: str, value: dict[str, Any]) -> None:
    assert parse_mapping("--flag", text) == value


@pytest.mark.parametrize("text", ["method", "=3", "{broken", "a=1,,b=2"])
def test_broken_mappings_name_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--flag"):
        parse_mapping("--flag", text)


@pytest.mark.parametrize("depth", [33, 900, 50_000])
@pytest.mark.parametrize("end", ["", "1"])
def test_a_mapping_that_is_nested_too_deep_is_refused(depth: int, end: str) -> None:
    text = '{"a":' * depth + end + "}" * depth if end else '{"a":' * depth
    with pytest.raises(ConfigError, match="--logit-bias(.|\n)*JSON"):
        parse_mapping("--logit-bias", text)


@pytest.mark.parametrize("value", ["[" * 50_000, "[" * 900 + "]" * 900, "9" * 5000])
def test_a_value_that_json_cannot_hold_is_text(value: str) -> None:
    assert parse_mapping("--flag", f"a={value}") == {"a": value}


def test_speculation_is_a_switch_or_values() -> None:
    assert parse_speculation("on") is True
    assert parse_speculation("off") is False
    assert parse_speculation("num_speculative_tokens=2") == {"num_speculative_tokens": 2}


def test_help_shows_the_default() -> None:
    texts = {parameter.name: parameter.annotation.__metadata__[0].help for parameter in SamplingFlags.parameters()}
    assert texts["temperature"].endswith("[default: 1.0]")
    assert texts["n"].endswith("[default: 1]")
    assert texts["max_tokens"].endswith(f"[default: {NEW_TOKENS}]")
    assert "[default" not in texts["seed"]


@pytest.mark.parametrize("flag", ["--otlp-endpoint", "--otlp-traces-endpoint"])
def test_a_flag_may_have_a_second_name(flag: str) -> None:
    options: list[ServerOptions] = []

    @accepts_flags
    def command(*, server: ServerFlags) -> None:
        options.append(server.options())

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [flag, "http://c:4318", "--access-log", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert (options[0].otlp_endpoint, options[0].access_log) == ("http://c:4318", "json")


def test_a_log_whose_reader_has_ended_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    read, written = os.pipe()
    os.close(read)
    with suppress(BrokenPipeError), os.fdopen(written, "w", encoding="utf-8") as stream:
        record = logging.LogRecord("log", logging.INFO, "path", 1, "a line", None, None)
        for kind in (LinePrinter, logging.StreamHandler):
            kind(stream).emit(record)
            assert ("BrokenPipeError" in capsys.readouterr().err) == (kind is logging.StreamHandler)
