"""`speculant demo`: correct figures, colour only where it is wanted, and the same text both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from speculant.cli import ComparedPrompt, DecodedPrompt, demo, pool, run, summary
from speculant.engine import LLM
from speculant.metrics import SpeculationMetrics
from speculant.params import SamplingParams
from tests.commands import invoke, json_of
from tests.models import EXACT_DTYPE, Checkpoints

TOKENS = 16


@pytest.fixture
def tiny(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo run with the tiny pair."""
    monkeypatch.setattr(
        demo,
        "_load",
        lambda length, shape, method: LLM(
            checkpoints.target,
            checkpoints.near,
            spec_length=length or demo.SPEC_LENGTH,
            dtype=EXACT_DTYPE,
            max_num_seqs=1,
        ),
    )


def _demo(*arguments: str) -> Result:
    return invoke("demo", "--max-tokens", TOKENS, *arguments)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("temperature", [pytest.param("0", marks=pytest.mark.slow), "0.8"])
def test_json_has_the_figures(temperature: str) -> None:
    value = json.loads(_demo("--json", "--temperature", temperature, "--seed", "3").stdout)
    assert value["identical_outputs"] == value["prompts"] == len(demo.PROMPTS)
    assert value["speculative_target_passes"] < value["plain_target_passes"]
    assert value["mean_acceptance_length"] > 1
    assert 1 < value["tokens_per_pass"] <= value["tokens"] / (value["speculative_target_passes"] - value["prompts"])
    assert 0 < value["draft_acceptance_rate"] <= value["acceptance_rate"] <= 1
    assert value["speedup"] == pytest.approx(value["speculative_tokens_per_s"] / value["plain_tokens_per_s"])
    assert [entry["prompt"] for entry in value["pairs"]] == list(demo.PROMPTS)
    assert all(entry["plain"]["text"] == entry["speculative"]["text"] for entry in value["pairs"])


@pytest.mark.usefixtures("tiny")
def test_text_has_prompts_and_figures_without_colour() -> None:
    output = _demo().stdout
    assert "\x1b[" not in output
    assert all(prompt in output for prompt in demo.PROMPTS)
    assert output.count("the same tokens") == len(demo.PROMPTS)
    assert "times as fast" in output
    assert f"identical outputs: {len(demo.PROMPTS)} of {len(demo.PROMPTS)} (speculation changed" in output
    assert "with the same seed" in output
    assert " tokens per pass of the target, acceptance rate " in output


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_demo_seed_replaces_the_seeds_of_the_prompts() -> None:
    own, same = (json.loads(_demo("--json", *seed).stdout)["pairs"] for seed in ((), ("--seed", "9")))
    seeds = list(demo.PROMPTS.values())
    equal = [a["plain"]["text"] == b["plain"]["text"] for a, b in zip(own, same, strict=True)]
    assert equal == [seed == 9 for seed in seeds]


@pytest.mark.parametrize(
    "method", ["eagle", *(pytest.param(each, marks=pytest.mark.slow) for each in ("medusa", "early_exit")), "suffix"]
)
def test_demo_shows_another_method(method: str) -> None:
    """Heads for the embedded target are embedded too."""
    llm = demo._load(None, None, method)
    assert llm.speculation.startswith(f"{method}, ")
    prompt, params = next(iter(demo.PROMPTS)), SamplingParams(temperature=0, max_tokens=TOKENS)
    plain = llm.generate(prompt, replace(params, speculation=False))[0]
    drafted = llm.generate(prompt, params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    if method in ("eagle", "medusa"):
        assert drafted.metrics.speculative_decoding.num_accepted_draft_tokens > 0


def test_accepted_and_chosen_tokens_have_their_colours(checkpoints: Checkpoints) -> None:
    llm = LLM(checkpoints.target, checkpoints.near, dtype=EXACT_DTYPE, spec_length=3)
    shown = _coloured(llm, no_color=False)
    assert "\x1b[32m" in shown, "green: drafted and accepted"
    assert "\x1b[1;33m" in shown, "bold yellow: chosen by the target"


def test_no_color_is_respected(checkpoints: Checkpoints) -> None:
    shown = _coloured(LLM(checkpoints.target, checkpoints.near, dtype=EXACT_DTYPE), no_color=True)
    assert "\x1b[32m" not in shown
    assert "33m" not in shown


def _coloured(llm: LLM, no_color: bool) -> str:
    from speculant.params import SamplingParams

    console = Console(
        force_terminal=True, color_system="standard", no_color=no_color, record=True, markup=False, highlight=False
    )
    with console.capture() as capture:
        demo._show_run(console, llm, "hello", SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    return capture.get()


def test_no_run_drafts_from_the_text_of_another(checkpoints: Checkpoints) -> None:
    """A run that repeats an earlier one takes as many passes: it finds no drafts in the finished text."""
    config = {"method": "suffix", "num_speculative_tokens": 8, "draft_length": "fixed"}
    llm = LLM(checkpoints.target, speculative_config=config, dtype=EXACT_DTYPE, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, *fast = (
        run(llm, "hello world, hello", replace(params, speculation=speculation), lambda piece: None)
        for speculation in (False, None, None)
    )
    assert plain.token_ids == fast[0].token_ids == fast[1].token_ids
    assert [each.sampled_passes for each in fast] == [fast[0].sampled_passes] * 2
    again = [list(llm.stream("hello world, hello", params))[-1].output for _ in range(2)]
    assert again[0] is not None
    assert again[1] is not None
    assert again[0].metrics.timing.sampled_passes == fast[0].sampled_passes > again[1].metrics.timing.sampled_passes, (
        "the fault that salts prevent is there without them"
    )


def _run(tokens: list[int], seconds: float, passes: int, accepted: int = 0) -> DecodedPrompt:
    spec = SpeculationMetrics()
    if accepted:
        spec.record(drafted=4, accepted=accepted, tested=4)
    return DecodedPrompt("", tokens, seconds, passes + 1, passes, spec)


def test_figures_are_pooled_not_averaged() -> None:
    total = pool([_run([1, 2, 3], 1.0, 2, accepted=2), _run([1], 3.0, 1, accepted=1)])
    assert (len(total.token_ids), total.seconds, total.target_passes) == (4, 4.0, 5)
    assert total.tokens_per_pass == 4 / 3, "a pass that only processes a part of a prompt does not count"
    assert total.tokens_per_s == 1.0
    assert total.speculation.mean_acceptance_length == 2.5


def test_a_difference_of_outputs_is_counted() -> None:
    pairs = [
        ComparedPrompt("a", _run([1, 2], 2.0, 2), _run([1, 2], 1.0, 1, accepted=1)),
        ComparedPrompt("b", _run([1, 2], 2.0, 2), _run([1, 3], 1.0, 1, accepted=1)),
    ]
    figures: dict[str, Any] = summary(pairs)
    assert figures["identical_outputs"] == 1
    assert figures["speedup"] == 2.0


@pytest.mark.slow
def test_the_embedded_pair_is_worth_showing() -> None:
    value = json_of("demo")
    assert value["mean_acceptance_length"] > 2
    assert value["identical_outputs"] == value["prompts"]
    assert not [entry["prompt"] for entry in value["pairs"] if _loops(entry["plain"]["token_ids"])]


def _loops(tokens: list[int]) -> bool:
    """Whether a text repeats itself: more than a fifth of its token triples occurred before."""
    runs = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(runs)) < 0.8 * len(runs)
