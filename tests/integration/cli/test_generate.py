"""`speculant generate`, with tiny random models."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from speculant.cli import read_prompt
from speculant.errors import RequestError
from tests.commands import invoke, json_of
from tests.models import Checkpoints

PROMPT = "def read(path):"


_invoke = partial(invoke, "generate")


def _json(checkpoints: Checkpoints, *arguments: str, prompt: str = PROMPT) -> dict[str, Any]:
    models = ("--model", checkpoints.target, "--draft-model", checkpoints.near)
    return json_of("generate", prompt, *models, "--dtype", "float64", "--spec-length", 5, *arguments)


def test_json_has_the_fields_that_programs_need(checkpoints: Checkpoints) -> None:
    value = _json(checkpoints, "--temperature", "0", "--max-tokens", "40", "--ignore-eos")
    assert len(value["token_ids"]) == 40
    assert value["finish_reason"] == "length"
    assert value["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 40, "total_tokens": len(PROMPT) + 40}
    assert value["text"]
    spec = value["metrics"]["speculative_decoding"]
    assert spec["mean_acceptance_length"] > 1
    assert value["metrics"]["tokens_per_pass"] == 40 / value["metrics"]["timing"]["sampled_passes"] > 1
    assert spec["num_draft_tokens"] >= spec["num_accepted_draft_tokens"] > 0
    assert value["metrics"]["timing"]["target_passes"] < 40
    assert value["speculation"]["on"] is True


@pytest.mark.parametrize("more", [(), ("--n", "2"), ("--json",)], ids=["streamed", "list", "json"])
def test_a_terminal_gets_no_characters_that_control_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """A model of bytes draws some of each; a pipe gets them, except in JSON, which escapes them."""
    settings = ("--model", checkpoints.target, "--temperature", "2", "--seed", "1", "--max-tokens", "200")
    given = (PROMPT, *settings, "--ignore-eos", *more)
    piped = _invoke(*given).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")  # no styles either
    shown = re.sub(r"\x1b\[\d*m", "", _invoke(*given).stdout)  # bold is no colour
    controls = {chr(each) for each in (*range(9), *range(11, 32), *range(127, 160))}
    assert bool(controls & {*piped}) == ("--json" not in more)
    assert not controls & {*shown}
    assert "--json" in more or shown == "".join(each for each in piped if each not in controls)


@pytest.mark.parametrize("model", ["demo", "a file"])
def test_a_model_before_the_prompt_is_told(tmp_path: Path, model: str) -> None:
    place = tmp_path / "model.gguf"
    place.touch()
    with pytest.raises(RequestError, match="write the prompt first, and then the model"):
        _invoke("demo" if model == "demo" else str(place), "def read(path):")


def test_speculation_changes_nothing(checkpoints: Checkpoints) -> None:
    fast = _json(checkpoints, "--temperature", "0", "--max-tokens", "40")
    plain = _json(checkpoints, "--temperature", "0", "--max-tokens", "40", "--speculation", "off")
    assert plain["token_ids"] == fast["token_ids"]
    assert plain["speculation"] == {"on": False, "detail": "switched off for this request"}


def test_samples_are_listed(checkpoints: Checkpoints) -> None:
    value = _json(checkpoints, "--n", "3", "--seed", "1", "--max-tokens", "8", "--ignore-eos")
    assert len(value["outputs"]) == 3
    assert value["outputs"][0]["token_ids"] == value["token_ids"]
    assert value["usage"]["completion_tokens"] == 24


@pytest.mark.slow
def test_the_speed_of_samples_is_that_of_all_of_them(checkpoints: Checkpoints) -> None:
    """The first sample ends at once: all tokens divided by its time alone would be a wrong speed."""
    arguments = ("--n", "4", "--seed", "5", "--max-tokens", "60", "--temperature", "1")
    value = _json(checkpoints, *arguments)
    ends = [sample["token_ids"][0] for sample in value["outputs"]]
    assert ends[0] not in ends[1:], "choose another seed"
    begun = time.perf_counter()
    value = _json(checkpoints, *arguments, "--stop-token-ids", str(ends[0]))
    elapsed = time.perf_counter() - begun
    samples, timing = value["outputs"], value["metrics"]["timing"]
    tokens = [len(sample["token_ids"]) for sample in samples]
    assert tokens[0] == 1 < min(tokens[1:])
    assert (sum(tokens) - 1) / timing["tokens_per_s"] == pytest.approx(timing["decode_s"])
    assert sum(tokens) / elapsed < timing["tokens_per_s"] < sum(tokens) / max(each_decode_s(samples))
    passes = [sample["metrics"]["timing"]["sampled_passes"] for sample in samples]
    assert value["metrics"]["tokens_per_pass"] == pytest.approx(sum(tokens) / sum(passes))
    own = [sample["metrics"]["tokens_per_pass"] for sample in samples]
    assert own == pytest.approx([count / each for count, each in zip(tokens, passes, strict=True)])
    assert timing["target_passes"] <= 1 + sum(passes)


def each_decode_s(samples: list[dict[str, Any]]) -> list[float]:
    """Return each sample's time from its first to its last token."""
    return [sample["metrics"]["timing"]["decode_s"] for sample in samples]


def test_beams_are_listed_with_their_scores(checkpoints: Checkpoints) -> None:
    value = _json(checkpoints, "--beam-width", "3", "--n", "2", "--max-tokens", "8", "--length-penalty", "0.5")
    assert [beam["score"] for beam in value["outputs"]] == sorted((b["score"] for b in value["outputs"]), reverse=True)
    assert value["score"] == pytest.approx(value["cumulative_logprob"] / len(value["token_ids"]) ** 0.5)
    assert value["metrics"]["speculative_decoding"]["verification"] == "beam"
    assert value["speculation"]["detail"].endswith("verified by beam")


def test_drafters_that_leave_beams_alone_are_named(checkpoints: Checkpoints) -> None:
    ngram = ("--speculative-config", "method=ngram,draft_length=fixed", "--max-tokens", "4")
    result = _invoke(PROMPT, "--model", checkpoints.target, *ngram, "--beam-width", "2")
    assert "speculation is off: ngram, 4 tokens a step, but not for a beam search" in result.stderr
    assert "but not for" not in _invoke(PROMPT, "--model", checkpoints.target, *ngram).stderr


def test_logprobs_are_reported(checkpoints: Checkpoints) -> None:
    value = _json(checkpoints, "--max-tokens", "3", "--ignore-eos", "--logprobs", "2", "--prompt-logprobs", "1")
    assert [entry["token"] for entry in value["logprobs"]] == value["token_ids"]
    assert all(2 <= len(entry["top"]) <= 3 for entry in value["logprobs"])
    assert value["prompt_logprobs"][0] is None
    assert len(value["prompt_logprobs"]) == len(PROMPT)


def test_text_goes_to_stdout_and_figures_to_stderr(checkpoints: Checkpoints) -> None:
    models = ("--model", checkpoints.target, "--draft-model", checkpoints.near)
    result = _invoke(PROMPT, *models, "--temperature", 0, "--max-tokens", 12, "--dtype", "float64")
    assert result.stdout == _json(checkpoints, "--temperature", "0", "--max-tokens", "12")["text"] + "\n"
    assert "12 tokens in" in result.stderr
    assert "speculation is on: " in result.stderr
    assert re.search(r"; \d\.\d\d tokens per pass, acceptance rate \d\.\d\d; ", result.stderr)


def test_a_text_that_may_differ_is_announced(checkpoints: Checkpoints) -> None:
    lenient = ("--speculation", "verification=lenient", "--max-tokens", "8")
    value = _json(checkpoints, *lenient)
    assert value["metrics"]["speculative_decoding"]["lossless"] is False
    warning = "verified by lenient (not lossless: the text may not be the target's own)"
    assert value["speculation"]["detail"].endswith(warning)
    strict = _json(checkpoints, "--max-tokens", "8")
    assert strict["metrics"]["speculative_decoding"]["lossless"] is True
    assert "lossless" not in strict["speculation"]["detail"]


def test_the_reason_for_no_speculation_is_named(checkpoints: Checkpoints) -> None:
    arguments = (PROMPT, "--model", checkpoints.target, "--max-tokens", "4")
    result = _invoke(*arguments, "--no-use-speculative-decoding")
    assert "speculation is off: use_speculative_decoding is False" in result.stderr
    assert "no draft model is named" in _invoke(*arguments).stderr


def test_samples_are_printed_under_their_numbers(checkpoints: Checkpoints) -> None:
    result = _invoke(PROMPT, "--model", checkpoints.target, "--max-tokens", "4", "--n", "2")
    assert "--- 1 of 2" in result.stdout
    assert "--- 2 of 2" in result.stdout


def test_prompt_comes_from_stdin_or_a_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    expected = _json(checkpoints, "--temperature", "0", "--max-tokens", "8")["text"] + "\n"
    arguments = ("--model", checkpoints.target, "--temperature", "0", "--max-tokens", "8", "--dtype", "float64")
    assert _invoke("-", *arguments, stdin=PROMPT).stdout == expected
    (tmp_path / "prompt.txt").write_text(PROMPT)
    assert _invoke("--prompt-file", str(tmp_path / "prompt.txt"), *arguments).stdout == expected


def test_exactly_one_prompt_is_required(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no prompt"):
        read_prompt(None, None)
    with pytest.raises(RequestError, match="two prompts"):
        read_prompt("a", tmp_path)
    with pytest.raises(RequestError, match="can't be read"):
        read_prompt(None, tmp_path / "absent")
