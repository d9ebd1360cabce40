"""`speculant bench compare`, `sweep` and `history`, as they are typed, with tiny random models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from speculant.lab.bench import compare, measuring
from tests.commands import error_of, invoke, json_of
from tests.integration.test_bench_report import Page
from tests.models import EXACT_DTYPE, Checkpoints

SMALL = ("--num-prompts", "2", "--max-tokens", "16", "--rounds", "2", "--dtype", EXACT_DTYPE)


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "STEPS", 1)
    monkeypatch.setattr(compare, "_COST_SECONDS", 0.01)
    monkeypatch.delenv("SPECULANT_MODEL", raising=False)


_invoke = partial(invoke, "bench")


def _json(*arguments: str) -> dict[str, Any]:
    return json_of("bench", *arguments, *SMALL)


def _pair(checkpoints: Checkpoints) -> tuple[str, ...]:
    return checkpoints.target, "--draft-model", checkpoints.near


def test_ways_are_measured_in_one_run(checkpoints: Checkpoints) -> None:
    ways = ("--method", "draft_model", "--method", "suffix", "--length", "3", "--setting", "verification=match")
    value = _json("compare", *_pair(checkpoints), *ways)
    names = ["draft_model, length 3", "suffix, length 3", "verification=match"]
    assert value["benchmark"] == "compare"
    assert list(value["ways"]) == names
    assert value["ways"][names[0]]["speculation"].startswith("draft_model, 3 tokens a step")
    assert value["ways"][names[0]]["settings"] == {"method": "draft_model", "num_speculative_tokens": 3}
    assert value["engine"]["model"] == checkpoints.target
    [case] = value["cases"]
    assert list(case["runs"]) == ["plain", *names]
    assert list(case["ratios"]) == [f"{name}/plain" for name in names]
    assert case["outputs"] == {"compared": True, "outputs": 4, "identical": dict.fromkeys(names, 4)}
    drafted = case["gains"][names[0]]
    assert set(drafted) >= {"acceptance_rate", "measured_speed", "predicted_speed", "best_length"}
    assert drafted["draft_length"]["median"] <= 3
    assert case["runs"][names[0]]["burst_tokens"]["median"] > 1 == case["runs"]["plain"]["burst_tokens"]["median"]
    assert case["fastest"] in ("plain", *names)
    assert case["conclusions"][0].startswith(("fastest", "no way is faster"))


def test_without_names_the_usual_ways_are_compared(checkpoints: Checkpoints) -> None:
    result = _invoke("compare", *_pair(checkpoints), *SMALL)
    assert "after 1 of 2 rounds: plain " in result.stderr
    shown = result.stdout
    lines = shown.splitlines()
    assert lines[0].startswith("speculation is on: plain decoding beside default, draft_model, ")
    assert "Speed: between tokens, over plain decoding" in shown
    headings = next(line.split() for line in lines if "tokens/s" in line)
    assert headings == ["tokens/s", "speed", "predicted", "tokens/pass", "acceptance"]
    for way in ("default", "draft_model", "suffix", "prompt_lookup"):
        assert f"outputs of {way} identical to plain: 4 of 4" in shown
        assert any(line.startswith(f"{way} ") for line in lines)
    assert "\x1b[" not in shown


@pytest.mark.slow
def test_prompts_that_run_together_are_compared_too(checkpoints: Checkpoints) -> None:
    together = _json("compare", *_pair(checkpoints), "--length", "2", "--together", "--max-num-seqs", "2")
    alone = _json("compare", *_pair(checkpoints), "--length", "2")
    assert [each["engine"]["max_num_seqs"] for each in (together, alone)] == [2, 1]
    steps = [each["cases"][0]["runs"]["plain"]["steps"]["median"] for each in (together, alone)]
    assert steps == [16, 32]


@pytest.mark.slow
def test_a_report_has_every_ways_tokens(checkpoints: Checkpoints, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, trace = tmp_path / "report.html", tmp_path / "trace.json"
    files = ("--report", str(report), "--trace", str(trace))
    result = _invoke("compare", *_pair(checkpoints), "--length", "1", "--length", "4", *SMALL, *files)
    assert f"written: {report}" in result.stderr
    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert {kind for kind, _ in page.tokens} >= {"accepted", "rejected", "corrected"}
    assert text.count("<svg") == 2 + 2 * 2 + 1
    for part in (
        "Tokens of the first prompt, length 1",
        "Tokens of the first prompt, length 4",
        "the same by the formula",
    ):
        assert part in text
    assert "Tokens of the first prompt, plain" not in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["plain", "length 1", "length 4"]


@pytest.mark.slow
def test_a_sweep_has_both_curves(checkpoints: Checkpoints, tmp_path: Path) -> None:
    report = ("--report", str(tmp_path / "sweep.html"))
    value = _json(
        "sweep", *_pair(checkpoints), "--length", "1", "--length", "4", "--batch", "1", "--batch", "2", *report
    )
    assert value["benchmark"] == "sweep"
    assert [case["batch"] for case in value["cases"]] == [1, 2]
    for case in value["cases"]:
        assert list(case["runs"]) == ["plain", "length 1", "length 4"]
        assert [row["length"] for row in case["lengths"]] == [1, 4]
        for row in case["lengths"]:
            assert row["measured_speed"]["median"] > 0
            assert row["predicted_speed"] > 0
            assert row["tokens_per_pass"]["median"] == pytest.approx(row["expected_tokens"], rel=0.3)
        assert 0 <= case["alpha"]["low"] <= case["alpha"]["mean"] <= case["alpha"]["high"] <= 1
        assert {best["length"] for best in case["best"].values()} <= {0, 1, 4}
        assert case["outputs"]["identical"] == {"length 1": 4, "length 4": 4}
    text = (tmp_path / "sweep.html").read_text(encoding="utf-8")
    assert text.count("Speed by draft length") == text.count("predicted before the runs") == 2


def test_a_sweeps_table_names_the_best_lengths(checkpoints: Checkpoints) -> None:
    shown = _invoke("sweep", *_pair(checkpoints), "--length", "2", *SMALL).stdout
    assert shown.startswith("speculation is on: draft_model with drafts of 2 tokens")
    assert "1 at a time" in shown
    assert "best length: found " in shown
    assert "predicted" in shown


@pytest.mark.slow
def test_categories_have_a_table(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    lines = [
        {"question_id": place, "category": category, "turns": [f"{category} {place}", "again"]}
        for place, category in enumerate(["writing", "math", "writing"])
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    arguments = (*_pair(checkpoints), "--length", "3", "--prompts", str(path), "--num-prompts", "3", *SMALL[2:])
    value = json.loads(_invoke("compare", *arguments, "--json").stdout)
    found = value["cases"][0]["categories"]
    assert {name: each["prompts"] for name, each in found.items()} == {"writing": 2, "math": 1}
    assert found["math"]["modes"]["length 3"]["speed"]["median"] > 0
    shown = _invoke("latency", "--model", *arguments[:3], *arguments[5:]).stdout
    assert "By category" in shown
    assert any(line.split()[:2] == ["writing", "2"] for line in shown.splitlines())


def test_the_history_names_slower_runs(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    for _ in range(2):
        _invoke("latency", "--model", *_pair(checkpoints), *SMALL, "--history", str(path))
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(entries) == 2
    assert set(entries[0]) == {"date", "revision", "machine", "command", "figures"}
    assert "speculative/plain tokens/s" in entries[0]["figures"]
    entries[1]["figures"] = {name: dict.fromkeys(each, 0.01) for name, each in entries[0]["figures"].items()}
    path.write_text("\n".join(map(json.dumps, entries)))
    shown = _invoke("history", str(path), code=1).stdout
    assert "compared with 1 earlier runs" in shown
    assert "slower: speculative/plain tokens/s" in shown
    value = json.loads(_invoke("history", str(path), "--json", code=1).stdout)
    assert {change["verdict"] for change in value["benchmarks"][0]["figures"]} == {"slower"}
    path.write_text(json.dumps(entries[0]))
    assert "nothing to compare with" in _invoke("history", str(path)).stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["compare", "--rounds", "0"], "rounds=0"),
        (["compare", "--method", "nothing"], "nothing"),
        (["compare", "--length", "2", "--length", "2"], "named twice"),
        (["compare", "--no-use-speculative-decoding"], "switched off"),
        (["compare", "--history", "/none/history.jsonl"], "folder of the history"),
        (["sweep", "--spec-length", "3"], "length itself"),
        (["sweep", "--length", "3", "--length", "1"], "ascend"),
        (["sweep", "--max-tokens", "900"], "max_model_len"),
    ],
)
def test_a_mistake_is_explained(checkpoints: Checkpoints, arguments: list[str], problem: str) -> None:
    error = error_of("bench", arguments[0], *_pair(checkpoints), *SMALL[:2], *arguments[1:])
    assert problem in error.problem
    assert error.fix


def test_a_missing_history_is_explained(tmp_path: Path) -> None:
    assert "--history" in error_of("bench", "history", tmp_path / "none").fix
