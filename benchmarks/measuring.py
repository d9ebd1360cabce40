"""What every benchmark here shares: interleaved timing, and results written with what produced them."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleave(subjects: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time every subject once per round, in turn, so that a noisy machine hits all of them alike; seconds."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            started = time.perf_counter()
            subject()
            times[name].append(time.perf_counter() - started)
    return times


class Clock:
    """Adds up the time inside some methods while it is open, by name ("Class.method")."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds: dict[str, float] = {}
        self._own = [(kind, name, getattr(kind, name)) for kind, name in methods]

    def __enter__(self) -> Clock:
        for kind, name, function in self._own:
            setattr(kind, name, self._timed(f"{kind.__name__}.{name}", function))
        return self

    def __exit__(self, *_: object) -> None:
        for kind, name, function in self._own:
            setattr(kind, name, function)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last time, and begin anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            return result

        return timed


def spread(values: list[float]) -> dict[str, float]:
    """Return the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": low, "median": median, "q3": high}


def ratio(times: Mapping[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Return the quartiles of one subject's time over another's, round by round."""
    return spread([a / b for a, b in zip(times[above], times[below], strict=True)])


def write(name: str, predicted: str, figures: Mapping[str, Any]) -> None:
    """Print figures and keep them in results/ with command, revision, versions and machine."""
    print(keep(name, predicted, figures))


def keep(name: str, predicted: str, figures: Mapping[str, Any]) -> str:
    """Keep figures in results/ with command, revision, versions and machine; return what was written."""
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "revision": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "src") else ""),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"processor": _processor(), "threads": torch.get_num_threads()},
        "predicted": predicted,
        "seen": figures,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(report, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return text


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
