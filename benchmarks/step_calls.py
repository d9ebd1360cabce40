"""The way of a token: Python calls of a step, and the files that a request passes.

Counted for plain decoding, a draft of a fixed length and the default, at batch 1. tests/architecture bounds both
numbers; its calls.py says what is counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # for `tests`, however the script is started

from speculant.lab.bench import Benchmark
from tests.architecture.calls import SETTINGS, STEPS, Counted, by_name, count_calls, file_of


def figures_of(counted: Counted) -> dict[str, Any]:
    """Return the numbers of calls and files, and where the calls of a request and of a step are."""
    totals = counted.totals
    return {
        "calls_per_step": {"median": median(totals), "fewest": min(totals), "most": max(totals)},
        "files": len(counted.files),
        "calls_of_a_request_by_file": counted.files,
        "calls_of_a_step": by_name(counted.usual, lambda code: f"{file_of(code)} {code.co_qualname}"),
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Count the calls of steps and of a request with each setting."""
    settings = SETTINGS.items()
    yield {name: figures_of(count_calls(each, arguments.model, arguments.steps)) for name, each in settings}


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="At most 200 calls a step by default and 130 with a fixed length, and 35 files a request.",
    measure=measure, options={"model": "demo", "steps": STEPS},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
