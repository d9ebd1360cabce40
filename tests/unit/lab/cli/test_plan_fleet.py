"""`speculant plan fleet`, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from speculant.cli import app
from speculant.errors import ConfigError, SpeculantError

STEP = ("--step-ms", "20", "--prompt-rate", "8000", "--requests", "60")
PAIR = {
    "step_ms": 20.0,
    "verification": {"tokens": [1, 2, 4, 8], "cost": [1.0, 1.1, 1.3, 1.7]},
    "verify_curve": {"tokens": [1, 2, 4, 8], "cost": [1.0, 2.1, 2.3, 2.7]},
    "precisions": {"int8": {"rates": [0.8, 0.7], "cost_ratio": 0.1, "draft_overhead": 0.2}},
    "best": {"precision": "int8"},
}


def _invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["plan", "fleet", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def _json(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(_invoke(*arguments, "--json").stdout))


def _error(*arguments: str) -> SpeculantError:
    error = CliRunner().invoke(app, ["plan", "fleet", *arguments]).exception
    assert isinstance(error, ConfigError), error
    return error


def _pair(folder: Path, **changes: Any) -> str:
    path = folder / "pair.json"
    path.write_text(json.dumps({**PAIR, **changes}))
    return str(path)


def test_each_number_and_routing_has_a_row() -> None:
    value = _json(*STEP, "--replicas", "1,2", "--routing", "random,least")
    assert [(row["replicas"], row["routing"]) for row in value["fleets"]] == [
        *((1, "random"), (1, "least"), (2, "random"), (2, "least"))
    ]
    row = value["fleets"][0]
    assert row["requests"] == 60
    assert row["errors"] == 0
    assert row["first_token_p50_s"] < row["first_token_p99_s"] < row["answer_p99_s"]
    assert row["tokens_per_machine_hour"] == pytest.approx(60 * 128 / row["machine_hours"])
    assert value["notes"] == []


def test_the_table_has_every_row() -> None:
    lines = _invoke(*STEP, "--replicas", "1,2", "--routing", "prefix-bounded").stdout.splitlines()
    assert [line.split()[:2] for line in lines if "prefix-bounded" in line] == 2 * [
        ["1", "prefix-bounded"],
        ["2", "prefix-bounded"],
    ]
    assert "…" not in "".join(lines)


def test_a_report_of_check_pair_gives_the_costs(tmp_path: Path) -> None:
    costs = _json("--costs", _pair(tmp_path), "--requests", "20")["settings"]["costs"]
    assert costs["rates"] == [0.8, 0.7]
    assert (costs["cost_ratio"], costs["draft_overhead"], costs["prompt_share"]) == (0.1, 0.2, 1.0)
    assert costs["seconds"]["tokens"] == [1, 2, 4, 8]
    assert costs["seconds"]["costs"] == pytest.approx([0.02, 0.022, 0.026, 0.034])


def test_flags_replace_the_report_s_numbers(tmp_path: Path) -> None:
    flags = ("--alpha", "0.5", "--cost-ratio", "0", "--draft-overhead", "0", "--step-ms", "40", "--requests", "20")
    costs = _json("--costs", _pair(tmp_path), *flags)["settings"]["costs"]
    assert costs["rates"] == [0.5]
    assert (costs["cost_ratio"], costs["draft_overhead"]) == (0, 0)
    assert costs["seconds"]["costs"][0] == pytest.approx(0.04)


def test_the_prompt_rate_is_that_of_full_passes(tmp_path: Path) -> None:
    """512 rows take 0.512 s, as long as 103.6 rows of the curve, which goes on with its last slope."""
    path = _pair(tmp_path)
    value = _json("--costs", path, "--prompt-rate", "1000", "--requests", "20")
    assert value["settings"]["costs"]["prompt_share"] == pytest.approx((8 + (0.512 - 0.034) / 0.002) / 512)
    assert value["notes"] == []
    assert "extrapolated" in _json("--costs", path, "--requests", "20")["notes"][0]
    assert "no pass of the curve" in _error("--costs", path, "--prompt-rate", "1e6").problem


def test_a_trace_replaces_the_drawn_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"seconds": 0, "prompt_tokens": 32, "answer_tokens": 4}\n' * 3)
    value = _json(*STEP, "--trace", str(path))
    assert value["fleets"][0]["requests"] == 3
    assert value["settings"]["traffic"] == {"trace": str(path)}


def test_failures_and_scaling_are_settings() -> None:
    flags = ("--failure-s", "20", "--start-s", "5", "--autoscale", "2:4", "--target", "3", "--rate", "10")
    value = _json(*STEP, *flags)
    assert value["settings"]["fleet"]["scaling"]["most"] == 4
    assert value["fleets"][0]["most_replicas"] >= 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "no time of a step"),
        (("--step-ms", "-1"), "step_ms=-1.0"),
        ((*STEP, "--replicas", "many"), "'many' is not a number"),
        ((*STEP, "--replicas", "0"), "replicas=0"),
        ((*STEP, "--routing", "nearest"), "routing='nearest'"),
        ((*STEP, "--autoscale", "4"), "'4' is not MIN:MAX"),
        ((*STEP, "--target", "4"), "--target has no autoscaler"),
        ((*STEP, "--trace", "missing.jsonl"), "missing.jsonl can't be read"),
        ((*STEP, "--costs", "missing.json"), "missing.json can't be read"),
        ((*STEP, "--alpha", "2"), "alpha=[2.0]"),
        ((*STEP, "--kv-tokens", "64"), "kv_tokens=64"),
    ],
)
def test_errors_name_what_was_given(arguments: tuple[str, ...], problem: str) -> None:
    error = _error(*arguments)
    assert problem in error.problem
    assert error.fix


def test_without_simpy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert _error(*STEP).fix == 'pip install -c constraints.txt "speculant[fleet]"'


def test_only_a_simulation_imports_simpy() -> None:
    code = (
        "import sys\nfrom speculant.cli.main import app\napp(['plan', '--alpha', '0.8', '--cost-ratio', '0.1'], "
        "standalone_mode=False)\nimport speculant.lab.fleet.fleet\nassert 'simpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_plan_itself_takes_no_subcommand_s_flags() -> None:
    result = CliRunner().invoke(app, ["plan", "--alpha", "0.8", "--cost-ratio", "0.05", "--json"])
    assert json.loads(result.stdout)["best_length"] > 0
    assert "fleet" in CliRunner().invoke(app, ["plan", "--help"]).stdout
