"""`speculant bench`, as it is typed, with tiny random models."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from speculant.cli import NEW_TOKENS, SamplingFlags
from speculant.lab.cli import BenchSampling
from speculant.params import SamplingParams
from tests.commands import error_of, invoke, json_of
from tests.models import Checkpoints

SMALL = ("--num-prompts", "3", "--max-tokens", "6", "--rounds", "2", "--dtype", "float64")
FIGURES = {
    "seconds", "tokens", "tokens_per_s", "request_tokens_per_s", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p90_s",
    "itl_p99_s", "burst_p50_s", "burst_p90_s", "burst_p99_s", "burst_tokens", "draft_s", "verify_s", "steps",
    "tokens_per_step", "tokens_per_pass", "mean_acceptance_length", "acceptance_rate", "preemptions",
    "prefix_hit_tokens", "peak_blocks",
}  # fmt: skip
GAINS = {
    "acceptance_rate", "draft_length", "cost_ratio", "verification_ratio", "predicted_speed", "best_length",
    "best_speed",
}  # fmt: skip


_invoke, _json = partial(invoke, "bench"), partial(json_of, "bench")


def _pair(checkpoints: Checkpoints) -> tuple[str, ...]:
    return "--model", checkpoints.target, "--draft-model", checkpoints.near, "--spec-length", "5", *SMALL


def test_throughput_has_the_figures_that_count(checkpoints: Checkpoints) -> None:
    value = _json("throughput", *_pair(checkpoints), "--sequential")
    assert set(value) == {"benchmark", "engine", "speculation", "blocks_total", "memory", "cases", "notes"}
    assert value["benchmark"] == "throughput"
    assert value["engine"]["model"] == checkpoints.target
    assert value["engine"]["max_model_len"] == 256
    assert value["speculation"] == {"on": True, "detail": "draft_model, 5 tokens a step, verified by match"}
    [case] = value["cases"]
    assert case["num_prompts"] == 3
    assert case["rounds"] == 2
    assert case["sampling"]["ignore_eos"] is True
    assert case["sampling"]["temperature"] == 0
    assert list(case["runs"]) == ["plain", "speculative", "plain_sequential", "speculative_sequential"]
    assert set(case["runs"]["speculative"]) == FIGURES
    assert set(case["runs"]["plain"]) == FIGURES - {"acceptance_rate"}
    assert all(set(spread) == {"q1", "median", "q3"} for spread in case["runs"]["plain"].values())
    assert case["runs"]["plain"]["tokens"]["median"] == 3 * 6
    assert case["runs"]["plain"]["steps"]["median"] == 6
    assert case["runs"]["plain_sequential"]["steps"]["median"] == 18
    assert case["ratios"]["speculative/plain"]["tokens_per_s"]["median"] > 0
    assert value["memory"]["draft_parameters"] == value["memory"]["target_parameters"] > 10_000
    assert set(case["gains"]) == {"speculative", "speculative_sequential"}
    assert set(case["gains"]["speculative_sequential"]) >= GAINS
    others = ("speculative", "plain_sequential", "speculative_sequential")
    assert case["outputs"] == {"compared": True, "outputs": 6, "identical": dict.fromkeys(others, 6)}


def test_latency_has_a_case_for_each_length(checkpoints: Checkpoints) -> None:
    value = _json("latency", *_pair(checkpoints), "--prompt-length", "20", "--prompt-length", "50")
    assert [case["prompt_tokens"]["median"] for case in value["cases"]] == [20, 50]
    for case in value["cases"]:
        assert set(case["runs"]) == {"plain", "speculative"}
        assert case["runs"]["plain"]["steps"]["median"] == 18, "one at a time, a token a step"
        assert set(case["runs"]["speculative"]) == FIGURES
        assert case["outputs"]["identical"] == {"speculative": 6}


def test_without_a_drafter_plain_is_measured_and_explained(checkpoints: Checkpoints) -> None:
    value = _json("latency", "--model", checkpoints.target, *SMALL, "--no-use-speculative-decoding")
    assert value["speculation"] == {"on": False, "detail": "use_speculative_decoding is False"}
    assert list(value["cases"][0]["runs"]) == ["plain"]
    switched = _json("latency", *_pair(checkpoints), "--speculation", "off")
    assert switched["speculation"] == {"on": False, "detail": "switched off for these requests"}


def test_text_has_tables_and_conclusions_without_colour(checkpoints: Checkpoints) -> None:
    shown = _invoke("throughput", *_pair(checkpoints)).stdout
    assert shown.startswith("speculation is on: draft_model, 5 tokens a step")
    assert "tokens/s of a request" in shown
    assert "outputs of speculative identical to plain: 6 of 6" in shown
    assert "\x1b[" not in shown
    shown = _invoke("latency", "--model", checkpoints.target, *SMALL, "--no-use-speculative-decoding").stdout
    assert shown.startswith("speculation is off: use_speculative_decoding is False")
    assert "first token (ms)" in shown


def test_prompts_are_random_or_from_a_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    drawn = _json("throughput", *_pair(checkpoints), "--prompts", "random", "--prompt-length", "30")["cases"][0]
    assert drawn["prompts"] == "random"
    assert drawn["prompt_tokens"] == {"min": 30, "median": 30, "max": 30}
    path = tmp_path / "prompts.txt"
    path.write_text("one\nthree\n")
    settings = [word for word in _pair(checkpoints) if word not in ("--num-prompts", "3")]
    read = _json("throughput", *settings, "--prompts", str(path), "--request-rate", "1000")["cases"][0]
    assert read["prompt_tokens"] == {"min": 3, "median": 4, "max": 5}
    assert read["request_rate"] == 1000


@pytest.mark.slow
def test_colour_and_progress_keep_off_the_result(checkpoints: Checkpoints) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    synthetic = ("--model", checkpoints.target, "--speculative-config", "method=synthetic", *SMALL)
    result = _invoke("throughput", *_pair(checkpoints), "--json", **terminal)
    assert json.loads(result.stdout)["benchmark"] == "throughput"
    assert "Measuring" in result.stderr
    colours = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert colours.search(_invoke("throughput", *synthetic, **terminal).stdout)
    assert not colours.search(_invoke("throughput", *synthetic, **terminal, NO_COLOR="1").output)


def test_runs_are_greedy_and_ignore_end_tokens_by_default() -> None:
    nothing = dict.fromkeys(SamplingFlags.names())
    assert BenchSampling(nothing).params() == SamplingParams(temperature=0, ignore_eos=True, max_tokens=NEW_TOKENS)
    given = BenchSampling({**nothing, "temperature": 0.5, "ignore_eos": False, "max_tokens": 3}).params()
    assert given == SamplingParams(temperature=0.5, ignore_eos=False, max_tokens=3)


def test_help_has_these_defaults_and_examples() -> None:
    for benchmark in ("throughput", "latency"):
        shown = " ".join(_invoke(benchmark, "--help", COLUMNS="250").stdout.split())
        assert "0 is greedy; higher is more varied. [default: 0]" in shown
        assert "Continue after an end token. [default: on]" in shown
        assert "--prompt-length" in shown
        assert f"Examples: speculant bench {benchmark}" in shown
        assert "--model" in shown
    assert "speculant bench throughput" in _invoke("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        (["--rounds", "0"], "rounds=0", "--rounds 5"),
        (["--num-prompts", "0"], "num_prompts=0", "above 0"),
        (["--prompt-length", "-3"], "prompt_length=-3", "above 0"),
        (["--prompt-length", "251"], "max_model_len=256", "prompt_length to 250"),
        (["--max-tokens", "300"], "300 to generate", "max_tokens"),
        (["--prompts", "cod"], "'cod' can't be read", '"code"'),
        (["--temperature", "-1"], "temperature=-1", "range"),
        (["--dtype", "float31"], "float31", "float32"),
    ],
)
@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_a_mistake_is_explained(
    checkpoints: Checkpoints, benchmark: str, arguments: list[str], problem: str, fix: str
) -> None:
    error = error_of("bench", benchmark, *_pair(checkpoints), *arguments)
    assert problem in error.problem
    assert fix in error.fix


def test_a_missing_model_is_explained() -> None:
    assert "--model demo" in error_of("bench", "latency").fix
