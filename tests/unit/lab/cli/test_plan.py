"""`speculant plan`, as it is typed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.errors import ConfigError

GIVEN = ("--alpha", "0.8", "--cost-ratio", "0.05")


def _invoke(*arguments: str, **env: str) -> Result:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False, env=env)
    assert result.exit_code == 0, result.output
    return result


def _json(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(_invoke(*arguments, "--json").stdout))


def _curve(folder: Path, content: object) -> tuple[str, ...]:
    path = folder / "curve.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return (*GIVEN, "--verify-curve", str(path))


def test_json_has_the_table_and_its_best_row() -> None:
    value = _json(*GIVEN, "--max-length", "12")
    assert set(value) == {
        *("settings", "lengths", "best_length", "best_speed", "oracle_speed", "least_alpha", "answers", "notes"),
    }
    assert value["settings"] == {
        "alpha": [0.8],
        "cost_ratio": 0.05,
        "operations_ratio": 0.05,
        "batch": 1,
        "max_length": 12,
        "verify_curve": None,
        "tokens": None,
        "correlation": 0.0,
    }
    assert [row["length"] for row in value["lengths"]] == list(range(13))
    assert set(value["lengths"][0]) == {"length", "tokens_per_pass", "cost", "speed", "operations"}
    row = value["lengths"][5]
    tokens = (1 - 0.8**6) / 0.2
    assert row["tokens_per_pass"] == pytest.approx(tokens)
    assert row["cost"] == pytest.approx(1.25)
    assert row["speed"] == pytest.approx(tokens / 1.25)
    assert row["operations"] == pytest.approx((5 * 0.05 + 6) / tokens)
    assert value["best_length"] == 8
    assert value["best_speed"] == max(row["speed"] for row in value["lengths"])
    assert value["oracle_speed"] == pytest.approx(1 / (0.2 + 0.8 * 0.05))
    assert value["least_alpha"] == pytest.approx(0.05)
    assert value["answers"] is None
    assert value["notes"] == []


def test_rates_by_depth_and_operations_are_used() -> None:
    value = _json("--alpha", "0.9,0.5,0", "--cost-ratio", "0", "--operations-ratio", "0.1", "--max-length", "3")
    assert [row["tokens_per_pass"] for row in value["lengths"]] == pytest.approx([1, 1.9, 2.35, 2.35])
    assert value["lengths"][2]["operations"] == pytest.approx(3.2 / 2.35)
    assert value["best_length"] == 2
    assert value["oracle_speed"] == pytest.approx(2.35)


@pytest.mark.parametrize(
    "content",
    [
        {"1": 1.0, "3": 1.2, "2": 1.1, "4": 2.0},
        {"tokens": [1, 2, 3, 4], "cost": [10, 11, 12, 20]},
        {"verify_curve": {"tokens": [1, 3, 4], "cost": [1, 1.2, 2.0]}, "alpha": {}},
    ],
    ids=["by tokens", "two lists in milliseconds", "a report"],
)
def test_curve_is_read_in_each_form(tmp_path: Path, content: object) -> None:
    value = _json(*_curve(tmp_path, content), "--max-length", "4")
    assert [row["cost"] for row in value["lengths"]] == pytest.approx([1.0, 1.15, 1.3, 2.15, 3.0])


def test_batch_reads_the_curve_at_its_number_of_rows(tmp_path: Path) -> None:
    value = _json(*_curve(tmp_path, {"1": 1.0, "2": 1.2, "4": 3.0}), "--batch", "2", "--max-length", "1")
    assert value["lengths"][1]["cost"] == pytest.approx(0.05 + 3.0 / 1.2)
    assert value["best_length"] == 0


def test_text_marks_the_best_length_and_draws_bars() -> None:
    shown = _invoke(*GIVEN).stdout
    [best] = [line for line in shown.splitlines() if " best " in line]
    assert best.split()[0] == "8"
    bars = {int(line.split()[0]): line.count("#") for line in shown.splitlines() if "##" in line}
    assert list(bars) == list(range(17))
    assert max(bars.values()) == bars[8] > bars[16] > bars[0]
    assert "best length: 8, 3.09 times the speed" in shown
    assert "drafts pay where alpha is above 0.050" in shown
    assert "oracle: 4.17 times" in shown
    assert "operations" in shown
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines() if "#" in line)


def test_text_says_when_nothing_pays() -> None:
    shown = _invoke("--alpha", "0.3", "--cost-ratio", "1.5", "--max-length", "4").stdout
    assert "best length: 0; no draft" in shown
    assert "drafts would not pay even if all tokens were accepted" in shown


def test_end_of_the_table_is_noted() -> None:
    shown = _invoke("--alpha", "0.95", "--cost-ratio", "0.01", "--max-length", "4").stdout
    assert "note: the best length is the longest in this table: raise --max-length" in shown


def test_colour_respects_no_color() -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    colours = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert colours.search(_invoke(*GIVEN, **terminal).stdout)
    assert not colours.search(_invoke(*GIVEN, **terminal, NO_COLOR="1").stdout)
    assert "\x1b" not in _invoke(*GIVEN).stdout


@pytest.mark.parametrize(
    ("arguments", "problem", "fix"),
    [
        ([], "no acceptance rate", "check-pair"),
        (["--alpha", "0.5"], "no cost ratio", "--cost-ratio 0.05"),
        (["--alpha", "high", "--cost-ratio", "0"], "'high' is not a number", "0.9,0.8"),
        (["--alpha", "1.2", "--cost-ratio", "0"], "alpha=[1.2]", "--alpha 0.8"),
        (["--alpha", "0.5,nan", "--cost-ratio", "0"], "alpha=[0.5, nan]", "--alpha 0.8"),
        (["--alpha", "0.5", "--cost-ratio", "-1"], "cost_ratio=-1", "0.05"),
        ([*GIVEN, "--operations-ratio", "inf"], "operations_ratio=inf", "0.05"),
        ([*GIVEN, "--batch", "0"], "batch=0", "--batch 1"),
        ([*GIVEN, "--max-length", "0"], "max_length=0", "--max-length 16"),
        ([*GIVEN, "--max-length", "513"], "max_length=513", "--max-length 16"),
        ([*GIVEN, "--tokens", "0"], "tokens=0", "--tokens 128"),
        ([*GIVEN, "--tokens", "9999"], "tokens=9999", "--tokens 128"),
        ([*GIVEN, "--tokens", "9", "--correlation", "1"], "correlation=1.0", "--correlation 0.3"),
        ([*GIVEN, "--correlation", "0.2"], "to simulated answers", "--tokens 128"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], problem: str, fix: str) -> None:
    error = CliRunner().invoke(app, ["plan", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert problem in error.problem
    assert fix in error.fix


@pytest.mark.parametrize(
    ("content", "problem", "fix"),
    [
        ("{", "not valid JSON", '{"1": 1.0'),
        ("[1]", "does not hold a JSON object", '{"1": 1.0'),
        ('{"verify_curve": 3}', "not a JSON object", '{"1": 1.0'),
        ('{"one": 1}', "'one', which is not a number of tokens", '{"1": 1.0'),
        ('{"1": 1, "2": "x"}', "'x', which is not a cost", '{"1": 1.0'),
        ('{"1": 1, "2": true}', "True, which is not a cost", '{"1": 1.0'),
        ('{"1": 1, "2": NaN}', "nan, which is not a cost", '{"1": 1.0'),
        ('{"1": 1, "2": -1}', "costs are [1.0, -1.0]", "above 0"),
        ('{"1": 1}', "numbers of tokens are [1]", "two or more"),
        ('{"1": 1, "2": 1.1, "02": 1.2}', "[1, 2, 2]", "ascending"),
        ('{"2": 1, "3": 1.1}', "[2, 3]", "from 1"),
        ('{"tokens": [1, 2]}', "two lists", '"cost": [1.0'),
        ('{"tokens": [1, 2], "cost": [1, 2], "1": 1}', "two lists", '"cost": [1.0'),
        ('{"tokens": [1, 2.5], "cost": [1, 2]}', "2.5, which is not a number of tokens", '"cost": [1.0'),
        ('{"tokens": [1, 2, 3], "cost": [1, 2]}', "3 numbers of tokens have 2 costs", "one cost each"),
        ('{"1": 1, "' + "9" * 400 + '": 2}', "not a number of tokens", '{"1": 1.0'),
    ],
)
def test_malformed_curves_are_explained(tmp_path: Path, content: str, problem: str, fix: str) -> None:
    error = CliRunner().invoke(app, ["plan", *_curve(tmp_path, content)]).exception
    assert isinstance(error, ConfigError)
    assert str(tmp_path / "curve.json") in error.problem
    assert problem in error.problem
    assert fix in error.fix


def test_a_missing_curve_file_is_explained(tmp_path: Path) -> None:
    error = CliRunner().invoke(app, ["plan", *GIVEN, "--verify-curve", str(tmp_path)]).exception
    assert isinstance(error, ConfigError)
    assert "can't be read" in error.problem


def test_help_needs_no_numpy() -> None:
    code = (
        "import sys\nfrom speculant.cli.main import app\n"
        "app(['plan', '--help'], standalone_mode=False)\nassert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ))


def test_answers_are_simulated_at_the_best_length() -> None:
    value = _json(*GIVEN, "--tokens", "512")
    answers = value["answers"]
    assert answers["low"] < answers["mean"] < answers["high"]
    assert answers["mean"] == pytest.approx(value["best_speed"], rel=0.03)
    assert _json(*GIVEN, "--tokens", "512")["answers"] == answers, "seeded"
    short = _json(*GIVEN, "--tokens", "8")["answers"]
    assert short["mean"] < answers["mean"], "the last draft of an answer is short"
    assert short["high"] - short["low"] > answers["high"] - answers["low"]


def test_correlation_widens_the_spread() -> None:
    independent, correlated = (
        _json(*GIVEN, "--tokens", "256", "--correlation", value)["answers"] for value in ("0", "0.6")
    )
    assert correlated["high"] - correlated["low"] > 1.3 * (independent["high"] - independent["low"])
    shown = _invoke(*GIVEN, "--tokens", "256").stdout
    assert f"answers of 256 tokens: {independent['mean']:.2f} times, 95% of them" in shown
