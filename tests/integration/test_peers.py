"""`python -m benchmarks.peers` at a tiny size: Speculant, transformers, and missing peers."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # processes that each import torch
MODES = {"plain", "draft 2", "lookup 2", "default"}
TOKENS = 6
PEERS = ["Speculant", "transformers", "OpenVINO GenAI", "llama.cpp", "vLLM"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Run once; return the JSON and what was printed."""
    folder = tmp_path_factory.mktemp("peers")
    (folder / "empty").mkdir()
    sizes = ["--prompts", "24", "--batches", "1", "2", "--tokens", str(TOKENS), "--rounds", "3", "--threads", "1"]
    chosen = [*sizes, "--lengths", "2", "--precisions", "bf16", "--cache", folder / "cache", "--json", folder / "json"]
    absent = [
        "--openvino-python",
        folder / "python",
        "--vllm-python",
        folder / "python",
        "--llama-cpp",
        folder / "empty",
    ]
    command = [sys.executable, "-m", "benchmarks.peers", *chosen, *absent, "--peers", *PEERS]
    done = subprocess.run(map(str, command), capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "json").read_text(encoding="utf-8")), done.stdout


def _rows(value: dict[str, Any], batch: int) -> dict[tuple[str, str], dict[str, Any]]:
    [case] = [case for case in value["cases"] if case["batch"] == batch]
    return {(row["peer"], row["mode"]): row for row in case["rows"]}


def test_peers_run_every_mode_they_have(outcome: tuple[dict[str, Any], str]) -> None:
    alone, together = _rows(outcome[0], 1), _rows(outcome[0], 2)
    assert set(alone) == {(peer, mode) for peer in ("Speculant", "transformers") for mode in MODES}
    assert set(together) == {*(("Speculant", mode) for mode in MODES), ("transformers", "plain")}
    assert any("takes one sequence" in note for case in outcome[0]["cases"] for note in case["notes"])


def test_peers_make_the_same_number_of_tokens(outcome: tuple[dict[str, Any], str]) -> None:
    for batch in (1, 2):
        for row in _rows(outcome[0], batch).values():
            assert [run["tokens"] for run in row["rounds"]] == [TOKENS * batch] * 3
            assert row["tokens_per_s"]["median"] > 0
            assert row["read_gb_per_s"]["median"] > 0


def test_peers_draft_only_where_they_should(outcome: tuple[dict[str, Any], str]) -> None:
    rows = _rows(outcome[0], 1)
    for peer in ("Speculant", "transformers"):
        assert rows[peer, "plain"]["rounds"][0]["drafted"] == 0
        assert rows[peer, "plain"]["tokens_per_pass"] == 1
        assert 0 < rows[peer, "draft 2"]["rounds"][0]["drafted"] <= 2 * TOKENS
        assert 0 <= rows[peer, "draft 2"]["acceptance"] <= 1


def test_own_text_is_the_same_in_every_mode(outcome: tuple[dict[str, Any], str]) -> None:
    for batch in (1, 2):
        rows = _rows(outcome[0], batch)
        assert all(row["same_text"] == 1 for (peer, _), row in rows.items() if peer == "Speculant")
        assert rows["transformers", "plain"]["same_text"] > 0.3  # near-ties may fall otherwise


def test_equal_settings_have_a_ratio(outcome: tuple[dict[str, Any], str]) -> None:
    rows = _rows(outcome[0], 1)
    assert rows["transformers", "draft 2"]["equal"]["tokens_per_s"]["median"] > 0
    assert [best["peer"] for best in outcome[0]["cases"][0]["best"]] == ["transformers"]


def test_command_can_be_run_again(outcome: tuple[dict[str, Any], str]) -> None:
    arguments = shlex.split(outcome[0]["command"])
    assert arguments[:3] == ["python", "-m", "benchmarks.peers"]
    assert arguments[arguments.index("--peers") + 1 :] == [
        "Speculant",
        "transformers",
        "OpenVINO GenAI",
        "llama.cpp",
        "vLLM",
    ]


def test_fewer_than_three_rounds_are_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "a median needs at least 3 rounds" in done.stderr


def test_missing_peers_are_named_and_skipped(outcome: tuple[dict[str, Any], str]) -> None:
    value, printed = outcome
    for name in ("OpenVINO GenAI", "llama.cpp", "vLLM"):
        peer = value["peers"][name]
        assert peer["version"] is None
        assert f"- {name}: skipped: {peer['missing']}. {peer['install']}" in printed
    assert "| 24 | 1 | bf16 | transformers, bfloat16 | draft 2 |" in printed
