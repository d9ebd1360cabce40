"""This checkout beside another one: the same workloads in turn, in two processes that stay alive.

    python benchmarks/revisions.py ../other [--starts 7] [--rounds 9] [--large-rounds 9]

`other` is a checkout with an environment of its own in .venv. A round runs every workload twice in each process, one
process at a time. Where a process's weights lie in memory changes its speed by a third, so the processes are started
several times: `speed` has the median over starts of the median over rounds of the other's time over this one's. More
than 1 means that this checkout is faster. `python benchmarks/revisions.py .` compares this checkout with itself, which
shows the error of the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import spread, write
from shapes import write_pair

HERE = Path(__file__).parents[1]
SMALL = [
    f"small, {drafting}, {batch}, {distribution}"
    for drafting in ("plain", "speculative")
    for batch in (1, 8)
    for distribution in ("greedy", "sampled")
]
LARGE = [
    "large, plain, 1, greedy",
    "large, speculative, 1, greedy",
    "large, plain, 8, greedy",
    "large, speculative, 8, greedy",
    "large, plain, 1, prompt",
]
AGREEMENT = 0.85
PREDICTED = "Nothing is slower: no median below 0.98."


class Process:
    """A worker in a checkout."""

    def __init__(self, checkout: Path, large: Sequence[Path]) -> None:
        python, script = checkout / ".venv" / "bin" / "python", HERE / "benchmarks" / "revision_worker.py"
        arguments = [str(python), str(script), json.dumps([str(each) for each in large])]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, workload: str) -> float:
        """Return the seconds of a workload."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(workload + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.kill()


def compare(this: Process, other: Process, workloads: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median speed of every workload here over there."""
    for workload in workloads:
        for each in (this, other):
            each.run(workload)  # the first time, engines are made
    ratios: dict[str, list[float]] = {workload: [] for workload in workloads}
    for _ in range(rounds):
        for workload in workloads:
            seconds = {this: 0.0, other: 0.0}
            for each in (this, other) * 2:  # nobody runs twice in a row: the second time would find warm caches
                seconds[each] += each.run(workload)
            ratios[workload].append(seconds[other] / seconds[this])
    return {workload: statistics.median(values) for workload, values in ratios.items()}


def start_and_compare(other: Path, large: Sequence[Path], workloads: Sequence[str], rounds: int) -> dict[str, float]:
    """Compare two new processes."""
    processes = Process(HERE, large), Process(other, large)
    try:
        return compare(*processes, workloads, rounds)
    finally:
        for process in processes:
            process.end()


def main() -> None:
    """Run the workloads in turn and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large-rounds", type=int, default=5, help="in the first start alone")
    options = parser.parse_args()
    speeds: dict[str, list[float]] = {workload: [] for workload in SMALL}
    with tempfile.TemporaryDirectory() as folder:
        large, other = write_pair(Path(folder), AGREEMENT), options.other.resolve()
        for _ in range(options.starts):
            for workload, speed in start_and_compare(other, large, SMALL, options.rounds).items():
                speeds[workload].append(speed)
        seen: dict[str, Any] = {workload: {"speed": spread(values)} for workload, values in speeds.items()}
        seen |= start_and_compare(other, large, LARGE, options.large_rounds)
    write("revisions", PREDICTED, seen)


if __name__ == "__main__":
    main()
