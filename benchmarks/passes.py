"""Whole passes of a 1B target by number of rows, here and in another checkout, in turn in two processes.

`other` is a checkout with an environment of its own in .venv. --weights: bfloat16, types to round to, or GGUF files.
--before: tokens of the text before the rows. `ms` has the median time of a pass, `over_one` that time over one row's
in the same round, `speed` the other checkout's time over this one's: more than 1 means that this one is faster. Passes
of more than 64 rows compute the logits of the last row alone, as a prompt's do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for the script's neighbours, however it is started

from benchmarks.revisions import HERE, SCRIPT, Worker, seconds, start

from speculant.lab.bench import Benchmark, quartiles
from speculant.lab.inflation import inflated_pair

THIS, OTHER = "this", "other"
REPEATS = 3  # of a pass of few rows, in a round; the median counts
FEW = 64


def timed(worker: Worker, weights: str, before: int, rows: int) -> float:
    """Return the seconds of a pass in a worker."""
    repeats = REPEATS if rows <= FEW else 1
    return statistics.median(seconds(worker, f"pass, {weights}, {before}, {rows}") for _ in range(repeats))


def compare(
    workers: Mapping[str, Worker], weights: str, before: int, rows: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Time passes of all numbers of rows in all workers, round by round, every other round backwards."""
    found: dict[str, dict[int, list[float]]] = {name: {count: [] for count in rows} for name in workers}
    for index in range(rounds + 1):
        for count in rows if index % 2 else reversed(rows):
            for name, worker in workers.items() if index % 2 else reversed(workers.items()):
                own = timed(worker, weights, before, count)
                if index:  # the first round loads models and computes texts
                    found[name][count].append(own)
    seen: dict[str, Any] = {}
    for count in rows:
        seen[str(count)] = {name: _figures(own, count) for name, own in found.items()}
        pairs = zip(found[OTHER][count], found[THIS][count], strict=True)
        seen[str(count)]["speed"] = quartiles([there / here for there, here in pairs])
    return seen


def _figures(own: Mapping[int, Sequence[float]], count: int) -> dict[str, Any]:
    over = [many / one for many, one in zip(own[count], own[min(own)], strict=True)]
    return {"ms": round(1e3 * statistics.median(own[count]), 2), "over_one": quartiles(over)}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare the types of weights one after the other."""
    pair, checkouts, seen = inflated_pair("1b"), {THIS: HERE, OTHER: arguments.other.resolve()}, dict[str, Any]()
    for weights in arguments.weights:
        with ExitStack() as until:
            script = HERE / "benchmarks" / SCRIPT  # this one for both: the other checkout's may know no passes
            workers = {name: start(checkout, pair, script, until) for name, checkout in checkouts.items()}
            for before in arguments.before:
                key = f"{Path(weights).name}, after {before} tokens"
                seen[key] = compare(workers, weights, before, arguments.rows, arguments.rounds)
                yield seen


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Two Zen 3 cores, after 512 tokens: 5 rows of int4 1.3 of one row (1.9 before), 8 rows 1.9 (2.9); int8 "
    "1.2 (2.0) and 1.6 (3.0); bfloat16 as before; a prompt of 512 tokens 1.6 times as fast in int4, 1.6 in int8.",
    measure=measure, rounds=7,
    options={"other": Path, "weights": ["bfloat16", "int8", "int4"], "before": [512], "rows": [1, 2, 3, 5, 8, 16, 512]},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
