"""The scripts of benchmarks/ run to their end at a small size: `--quick` writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT, DEMO = Path(__file__).parents[2], "src/speculant/assets/demo"
COMMANDS = [
    ["benchmarks/first_token.py"],
    ["benchmarks/formats.py", "--models", "embedded", "--forms", "int8", "q8_0", "--answer", "8"],
    ["benchmarks/heads.py", "--methods", "medusa", "suffix", "default", "--tokens", "16"],
    ["benchmarks/never_slower.py", "--texts", "edit", "--methods", "suffix", "--lengths", "2", "--tokens", "16"],
    ["benchmarks/overlap.py", "--pair", f"{DEMO}/target", f"{DEMO}/draft", "--tokens", "16", "--prompts", "2"],
    ["benchmarks/real_text.py", "--pair", f"{DEMO}/target", f"{DEMO}/draft", "--tokens", "16", "--prompts", "2"],
    ["-m", "benchmarks.t5", "--made", "tiny tiny"],
    ["-m", "benchmarks.theory", "--measure", "--prompts", "2", "--tokens", "16"],
]  # the others take minutes or gigabytes
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: next(word for word in command if "benchmarks" in word)
)
def test_script_runs(command: list[str]) -> None:
    before = _changes()
    done = subprocess.run([sys.executable, *command, "--quick"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert _changes() == before


def _changes() -> str:
    status = ["git", "status", "--porcelain", "benchmarks", "docs"]
    return subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=False).stdout
