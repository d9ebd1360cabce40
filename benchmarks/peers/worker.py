"""The process of a Python peer: reads a job, measures it, writes the results.

python -m benchmarks.peers.worker MODULE JOB RESULTS
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.peers.base import Job


def main() -> None:
    """Run one job; the module's `measure(job)` yields each mode's name and measurement."""
    module, job, results = sys.argv[1:]
    measured = importlib.import_module(module).measure(Job.read(Path(job)))
    Path(results).write_text(json.dumps({mode: asdict(each) for mode, each in measured}), encoding="utf-8")


if __name__ == "__main__":
    main()
