"""This checkout beside another one: the same workloads in turn, in two processes that stay alive.

`other` is a checkout with an environment of its own in .venv; each checkout runs its own revision_worker.py. A round
runs every workload twice in each process, one process at a time. The place of a process's weights in memory changes its
speed by a third, so the processes are started several times: `speed` has the median over starts of the median over
rounds of the other's time over this one's. More than 1 means that this checkout is faster. The comparison of this
checkout with itself (`.`) shows the error of the method.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from speculant.lab.bench import Benchmark, quartiles
from speculant.lab.inflation import write_pair

HERE = Path(__file__).parents[1]
SMALL = [
    f"small, {drafting}, {batch}, {distribution}"
    for drafting in ("plain", "speculative")
    for batch in (1, 8, 32)
    for distribution in ("greedy", "sampled")
]
LARGE = [f"large, {drafting}, {batch}, greedy" for batch in (1, 8) for drafting in ("plain", "speculative")]
LARGE += ["large, plain, 1, prompt"]
AGREEMENT = 0.85
SCRIPT = "revision_worker.py"

Worker = subprocess.Popen[str]


def seconds(worker: Worker, workload: str) -> float:
    """Run a workload in a worker."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(workload + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def compare(this: Worker, other: Worker, workloads: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the median speed of every workload here over there."""
    for workload in workloads:
        for worker in (this, other):
            seconds(worker, workload)  # the first run makes engines
    ratios: dict[str, list[float]] = {workload: [] for workload in workloads}
    for _ in range(rounds):
        for workload in workloads:  # no worker runs twice in a row: the second run would find warm caches
            (here, there), (again, there_again) = (
                (seconds(this, workload), seconds(other, workload)) for _ in range(2)
            )
            ratios[workload].append((there + there_again) / (here + again))
    return {workload: statistics.median(values) for workload, values in ratios.items()}


def start(checkout: Path, pair: Sequence[Path], script: Path, until: ExitStack) -> Worker:
    """Start a worker by a checkout's Python; it ends with the block."""
    command = [str(checkout / ".venv" / "bin" / "python"), str(script), json.dumps(list(map(str, pair)))]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until.callback(worker.kill)
    return worker


def start_and_compare(other: Path, pair: Sequence[Path], workloads: Sequence[str], rounds: int) -> dict[str, float]:
    """Compare two new processes."""
    with ExitStack() as until:
        this, there = (start(each, pair, each / "benchmarks" / SCRIPT, until) for each in (HERE, other))
        return compare(this, there, workloads, rounds)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the small workloads in every start, the large ones in one."""
    speeds: dict[str, list[float]] = {workload: [] for workload in SMALL}
    with tempfile.TemporaryDirectory() as folder:
        pair, other = write_pair(Path(folder), AGREEMENT), arguments.other.resolve()
        for _ in range(arguments.starts):
            for workload, speed in start_and_compare(other, pair, SMALL, arguments.rounds).items():
                speeds[workload].append(speed)
        seen: dict[str, Any] = {workload: {"speed": quartiles(values)} for workload, values in speeds.items()}
        yield seen
        yield seen | start_and_compare(other, pair, LARGE, arguments.large_rounds)


BENCHMARK = Benchmark(
    __file__, __doc__, predicted="Nothing is slower: no median below 0.98.", measure=measure, rounds=5,
    options={"other": Path, "starts": 7, "large_rounds": 5},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
