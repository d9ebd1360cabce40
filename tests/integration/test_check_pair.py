"""`speculant check-pair`, as it is typed, with tiny random models and the embedded pair."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speculant import files
from speculant.config import EngineConfig
from speculant.errors import ModelError, PairError, SpeculantError
from speculant.kernels import REFERENCE, usable_sets
from speculant.lab.bench import (
    SPECULATIVE,
    Bench,
    LengthCosts,
    Text,
    TextAcceptance,
    TextReader,
    Workload,
    both_ways,
    measuring as steps,
    pair,
)
from speculant.lab.theory import FLAT, expected_costs, speedups, step_costs, survival
from speculant.models import load_model
from speculant.params import SamplingParams
from tests.commands import error_of, invoke, json_of
from tests.mapped import in_order
from tests.models import Checkpoints, Shape, write_checkpoint

SMALL = ("--tokens", "12", "--kernels", "reference")
TOP = {
    "target", "draft", "size_ratio", "sampling", "texts", "step_ms", "step_spread", "verification", "verify_curve",
    "precisions", "best", "measured", "pays", "verdict", "flags", "draft_lacks_tokens", "vocabulary",
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "STEPS", 1)
    monkeypatch.setattr(pair, "_COST_SECONDS", 0.01)
    monkeypatch.setattr(pair, "SPEED_SECONDS", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("def read(path):\nimport os\n")
    return str(path)


_invoke, _json = partial(invoke, "check-pair"), partial(json_of, "check-pair")


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """Keep what `report` returns."""
    return []


@pytest.fixture
def report(checkpoints: Checkpoints, prompts: str, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON of a small pair."""
    if not kept:
        kept.append(_json(checkpoints.target, checkpoints.far, *SMALL, "--prompts", prompts))
    return kept[0]


def test_json_has_all_that_was_measured(report: dict[str, Any]) -> None:
    value = report
    assert set(value) == TOP
    assert value["target"]["parameters"] > value["draft"]["parameters"] > 10_000
    assert value["size_ratio"] == value["draft"]["parameters"] / value["target"]["parameters"]
    assert value["target"]["dtype"] == "float32"
    assert value["texts"] == 2
    assert value["sampling"] == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert value["verification"]["tokens"] == [*range(1, 12), 13, 17]
    assert value["verification"]["cost"][0] == 1.0
    assert list(value["precisions"]) == ["none"], "the reference kernels round no weights"
    own = value["precisions"]["none"]
    assert own["alpha"]["tokens"] == 2 * 11
    assert own["alpha"]["low"] <= own["alpha"]["mean"] <= own["alpha"]["high"]
    assert [row["length"] for row in own["lengths"]] == list(range(11))
    assert own["lengths"][0] == {"length": 0, "tokens_per_pass": 1.0, "speed": 1.0}
    assert own["best_speed"] == max(row["speed"] for row in own["lengths"])
    measured = value["measured"]
    assert set(measured["speed"]) == {"q1", "median", "q3"}
    assert set(measured["tokens_per_s"]) == {"plain", "speculative"}
    assert measured["rounds"] == 3
    assert measured["predicted"] > 0
    assert measured["outputs"] == measured["identical_outputs"] == 3 * measured["prompts"]
    assert value["best"]["length"] >= 1


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
def test_every_precision_of_the_kernels_is_compared(checkpoints: Checkpoints, prompts: str) -> None:
    value = _json(checkpoints.target, checkpoints.near, "--tokens", "12", "--prompts", prompts)
    assert set(value["precisions"]) == {"none", "int8", "int4"}
    assert len({each["alpha"]["mean"] for each in value["precisions"].values()}) > 1
    best = {name: max(row["speed"] for row in each["lengths"][1:]) for name, each in value["precisions"].items()}
    assert value["best"]["precision"] == max(best, key=lambda name: best[name])


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param((), id="greedy"),
        pytest.param(("--temperature", "0.9", "--top-k", "40"), id="sampled", marks=pytest.mark.slow),
    ],
)
def test_text_ends_with_a_verdict_and_flags(checkpoints: Checkpoints, prompts: str, sampling: Sequence[str]) -> None:
    arguments = ("--tokens", "8", "--prompts", prompts)
    shown = _invoke(checkpoints.target, checkpoints.near, *arguments, *sampling).stdout
    for part in ("target: target", "draft: near", "alpha (95%)", "tokens/pass", "measured: ", "predicted: "):
        assert part in shown
    assert ("outputs identical to plain" in shown) == (not sampling)
    assert shown.splitlines()[-1].startswith(("it pays: ", "it does not pay: ", "it makes no clear difference: "))
    assert "\x1b[" not in shown


@pytest.mark.parametrize("busy", [False, True])
def test_a_busy_machine_is_named(
    busy: bool, checkpoints: Checkpoints, prompts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_spread", lambda totals: 2.34 if busy else 1.2)
    monkeypatch.setattr(files, "STEADY", 1.5)
    shown = _invoke(checkpoints.target, checkpoints.near, "--tokens", "8", "--prompts", prompts).stdout
    assert ("other programs were busy: half of the steps took 2.3 times the least or more" in shown) == busy


@pytest.mark.slow
def test_verdict_follows_the_measured_speed(checkpoints: Checkpoints) -> None:
    """A draft as large as the target can't pay: one of its passes costs as much as it saves."""
    value = _json(checkpoints.target, checkpoints.target, *SMALL)
    assert value["precisions"]["none"]["alpha"]["mean"] == 1.0
    speed = value["measured"]["speed"]
    expected = None if speed["q1"] <= 1 <= speed["q3"] else speed["median"] > 1
    assert value["pays"] is expected


def test_flags_are_those_of_generate(checkpoints: Checkpoints, prompts: str) -> None:
    value = _json(checkpoints.target, checkpoints.near, "--tokens", "12", "--prompts", prompts, "--dtype", "float32")
    assert "--dtype float32" in value["flags"]
    assert f"--spec-length {value['best']['length']}" in value["flags"]
    assert f"--draft-quantization {value['best']['precision']}" in value["flags"]
    invoke("generate", "hello", "--max-tokens", "4", *shlex.split(value["flags"]))


def test_plan_reads_the_curve(report: dict[str, Any], tmp_path: Path) -> None:
    value = report
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(value))
    own = value["precisions"]["none"]
    plan = json_of("plan", "--alpha", "0.5", "--cost-ratio", own["cost_ratio"], "--verify-curve", path)
    overhead = own["draft_overhead"]
    expected = value["verification"]["cost"][3] + overhead + 3 * own["cost_ratio"]
    assert plan["lengths"][3]["cost"] == pytest.approx(expected)


@pytest.mark.slow
def test_embedded_pair_is_called_demo() -> None:
    value = _json("demo", "demo", "--tokens", "16")
    assert (value["target"]["name"], value["draft"]["name"]) == ("demo/target", "demo/draft")
    assert 0.1 < value["size_ratio"] < 0.3
    assert 0.4 < value["precisions"]["none"]["alpha"]["mean"] < 0.95
    assert "--model demo --draft-model demo" in value["flags"]


@pytest.mark.slow
def test_passes_are_those_of_the_engine(checkpoints: Checkpoints) -> None:
    """Greedy acceptance along a text says exactly how many passes each length takes."""
    config = EngineConfig(checkpoints.target, checkpoints.near, dtype="float64")
    target, [own] = pair.load_pair(config)
    workload = Workload("test", [[65 + start, 66, 67] for start in range(2)])
    texts = pair.write_texts(own.runtime, workload, GREEDY)
    acceptance = own.acceptance(target, texts, GREEDY)
    bench = Bench(own.runtime)
    for length in (1, 2, 4, 9):
        params = SamplingParams(temperature=0.0, max_tokens=40, speculation={"num_speculative_tokens": length})
        run = bench.run(workload, both_ways(params, speculating=True, sequential=True)[SPECULATIVE])
        passes = sum(expected_costs(each.given, np.ones(length + 1))[length] for each in acceptance)
        assert run.steps == len(texts) + passes, "a step for each prompt, and the passes"


def test_prediction_is_the_formulas_for_one_rate() -> None:
    lengths = tuple(range(11))
    costs = LengthCosts(lengths, [0.2 * length for length in lengths], [1.0] * 11)
    found = pair.predict([TextAcceptance(np.full(1500, 0.8), np.full(1500, 0.8))], costs, costs)
    assert found.alpha.mean == pytest.approx(0.8)
    assert found.speeds == pytest.approx(speedups(survival(0.8, 10), step_costs(0.2, FLAT, 10)), rel=5e-3)
    assert found.best_length == found.best_draft == int(np.argmax(found.speeds))
    slow = LengthCosts(lengths, [2.0 * length for length in lengths], [1.0] * 11)
    found = pair.predict([TextAcceptance(np.full(300, 0.8), np.full(300, 0.8))], slow, slow)
    assert (found.best_length, found.best_draft) == (0, 1)


def test_texts_are_the_targets_own(checkpoints: Checkpoints) -> None:
    _, [own] = pair.load_pair(EngineConfig(checkpoints.target, checkpoints.near, dtype="float64"))
    workload = Workload("test", [[65, 66]])
    assert pair.write_texts(own.runtime, workload, GREEDY) == [Text([65, 66], pair_output(own, [65, 66]))]


@pytest.mark.slow
def test_text_that_would_end_at_once_is_measured(tmp_path: Path) -> None:
    """All tokens but one end a text, so it goes no further than it has to."""
    ends = [token for token in range(264) if token != 65]
    target = write_checkpoint(tmp_path / "target", Shape(end=ends))
    draft = write_checkpoint(tmp_path / "draft", Shape(end=ends, noise=0.1))
    value = _json(target, draft, *SMALL)
    assert 8 <= value["precisions"]["none"]["alpha"]["tokens"] <= 16
    assert value["measured"]["speed"]["median"] > 0


def pair_output(candidate: pair.Candidate, prompt: list[int]) -> Sequence[int]:
    engine = candidate.runtime.engine
    [request] = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=40, speculation=False), "plain")
    while engine.has_unfinished():
        engine.step()
    return request.output


@pytest.mark.parametrize(
    ("arguments", "kind", "problem", "fix"),
    [
        (["--tokens", "3"], SpeculantError, "tokens=3", "--tokens 8"),
        (["--prompts", "/nowhere.txt"], SpeculantError, "can't be read", "UTF-8"),
        (["--temperature", "-1"], SpeculantError, "temperature=-1", "range"),
        (["--tokens", "400"], SpeculantError, "max_model_len=256", "max_tokens"),
        (["--kernels", "reference", "--quantization", "int8"], SpeculantError, "quantization='int8'", "native"),
    ],
)
def test_mistakes_are_explained(
    checkpoints: Checkpoints, arguments: list[str], kind: type[SpeculantError], problem: str, fix: str
) -> None:
    error = error_of("check-pair", checkpoints.target, checkpoints.near, *arguments)
    assert isinstance(error, kind)
    assert problem in str(error)
    assert fix in str(error)


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Write the target's model with other ids for its bytes, and none for vowels."""
    order = [byte for byte in range(255, -1, -1) if byte not in b"aeiou"]
    return in_order(tmp_path / "other", order, Shape())


def test_other_tokenizer_is_measured(checkpoints: Checkpoints, prompts: str, other: str) -> None:
    value = _json(checkpoints.target, other, "--tokens", "12", "--prompts", prompts)
    shared = value["vocabulary"]
    assert (shared["shared"], shared["size"]) == (253, 264)
    assert shared["draft_tokens_per_token"] == 1, "a byte that it lacks is read as one other token"
    assert shared["read_us_per_token"] > 0
    assert 0.5 < shared["target_mass"] < 1
    assert shared["draft_mass"] == pytest.approx(1, abs=1e-3), "it has no token of its own"
    assert value["precisions"]["none"]["alpha"]["mean"] > 0.2
    assert shared["verdict"].startswith("the vocabularies differ: they share 253 of the target's 264 tokens")


@pytest.mark.slow
def test_other_tokenizer_is_shown(checkpoints: Checkpoints, prompts: str, other: str) -> None:
    shown = _invoke(checkpoints.target, other, *SMALL, "--prompts", prompts).stdout
    assert "they share 253 of the target's 264 tokens" in " ".join(shown.split())


def test_mass_is_the_probability_of_the_shared_tokens(checkpoints: Checkpoints) -> None:
    reader, text = TextReader(load_model(checkpoints.target, "float32").model, REFERENCE, 264), Text([65, 66], [70, 90])
    whole = reader.distributions(text, SamplingParams())
    found = pair._mass(reader.logits, [text], [*range(100)])
    assert found == pytest.approx(float(whole[:, :100].sum(-1).mean()), abs=1e-6)


def test_pairs_without_a_common_token_are_a_clear_error(checkpoints: Checkpoints, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape(vocab_size=5), tokens=["zz", "yy", "xx"])
    error = error_of("check-pair", checkpoints.target, other)
    assert isinstance(error, PairError)
    assert "no token in common" in error.problem
    missing = error_of("check-pair", checkpoints.target, "/nowhere")
    assert isinstance(missing, ModelError)


@pytest.mark.slow
def test_tokens_that_the_draft_lacks_are_counted(checkpoints: Checkpoints, prompts: str, tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", added=["<think>", "<call>"])
    shown = _invoke(target, checkpoints.near, *SMALL, "--prompts", prompts).stdout
    assert "the draft lacks 2 of the target's tokens" in shown


@pytest.mark.slow
def test_colour_and_progress_keep_off_the_result(checkpoints: Checkpoints, prompts: str) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    pair_ = (checkpoints.target, checkpoints.near, *SMALL, "--prompts", prompts)
    result = _invoke(*pair_, "--json", **terminal)
    assert set(json.loads(result.stdout)) == TOP
    assert "Measuring acceptance" in result.stderr
    colours = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert colours.search(_invoke(*pair_, **terminal).stdout)
    assert not colours.search(_invoke(*pair_, **terminal, NO_COLOR="1").stdout)


@pytest.mark.slow  # test_main.py has the help of every command, and imports
def test_help_has_examples() -> None:
    shown = _invoke("--help", COLUMNS="200").stdout
    assert "Examples:" in shown
    assert "speculant check-pair demo demo" in shown
    assert "[default: 0]" in shown
