"""The way of a token: Python calls of a step, and the files that a request passes.

Greedy, batch 1, a draft model with a fixed length. Counted are calls of the package's own functions in the thread of
`LLM.generate`: per step once the request decodes, and the files of all calls from the prompt to the text.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import speculant
from speculant import LLM, SamplingParams
from speculant.lab.bench.scripts import Benchmark

ROOT = Path(speculant.__file__).parent
PROMPT = "def read(path):\n"


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """Count the calls of the package's functions in this thread."""
    calls = Counter[CodeType]()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            calls[frame.f_code] += 1

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of_steps(llm: LLM, steps: int) -> list[Counter[CodeType]]:
    """Return the calls of each of `steps` steps of a request that decodes."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm.engine.add_request(llm.tokenizer.encode(PROMPT), params, "steps")
    for _ in range(5):
        llm.engine.step()
    found = list[Counter[CodeType]]()
    for _ in range(steps):
        with counted() as calls:
            llm.engine.step()
        found.append(calls)
    llm.engine.abort("steps")
    return found


def by_name(calls: Counter[CodeType], name: Callable[[CodeType], str]) -> dict[str, int]:
    """Return numbers of calls by the name of their function, most first."""
    named = Counter[str]()
    for code, count in calls.items():
        named[name(code)] += count
    return dict(named.most_common())


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Count the calls of steps and of a request."""
    speculation: dict[str, Any] = {"method": "draft_model", "model": arguments.draft_model, "num_speculative_tokens": 5}
    llm = LLM(arguments.model, speculative_config=speculation)
    steps = calls_of_steps(llm, arguments.steps)
    totals = [sum(calls.values()) for calls in steps]
    usual = next(calls for calls, total in zip(steps, totals, strict=True) if total >= median(totals))
    params = SamplingParams(temperature=0, max_tokens=64)
    with counted() as calls:
        llm.generate(PROMPT, params)
    files = by_name(calls, _file)
    yield {
        "calls_per_step": {"median": median(totals), "fewest": min(totals), "most": max(totals)},
        "files": len(files),
        "calls_of_a_request_by_file": files,
        "calls_of_a_step": by_name(usual, lambda code: f"{_file(code)} {code.co_qualname}"),
    }


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Fewer than 250 calls a step and fewer than 35 files a request.",
    measure=measure, options={"model": "demo", "draft_model": "demo", "steps": 50},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
