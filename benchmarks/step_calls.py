"""The way of a token: Python calls of a step, and the files that a request passes.

    python benchmarks/step_calls.py [--model demo] [--draft-model demo]

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

from measuring import write

import speculant
from speculant import LLM, SamplingParams

ROOT = Path(speculant.__file__).parent
PROMPT = "def read(path):\n"
PREDICTED = "Fewer than 250 calls a step and fewer than 35 files a request."


@contextmanager
def counted(calls: Counter[CodeType]) -> Iterator[None]:
    """Count the calls of the package's functions in this thread."""

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            calls[frame.f_code] += 1

    sys.setprofile(record)
    try:
        yield
    finally:
        sys.setprofile(None)


def calls_of_steps(llm: LLM, params: SamplingParams, steps: int) -> list[Counter[CodeType]]:
    """Return the calls of each of `steps` steps of a request that decodes."""
    llm.engine.add_request(llm.tokenizer.encode(PROMPT), params, "steps")
    for _ in range(5):
        llm.engine.step()
    found = [Counter[CodeType]() for _ in range(steps)]
    for calls in found:
        with counted(calls):
            llm.engine.step()
    llm.engine.abort("steps")
    return found


def calls_of_request(llm: LLM, params: SamplingParams) -> Counter[CodeType]:
    """Return the calls from a prompt to its text."""
    calls = Counter[CodeType]()
    with counted(calls):
        llm.generate(PROMPT, params)
    return calls


def by_name(calls: Counter[CodeType], name: Callable[[CodeType], str]) -> dict[str, int]:
    """Return numbers of calls by what `name` makes of a function, most first."""
    named = Counter[str]()
    for code, count in calls.items():
        named[name(code)] += count
    return dict(named.most_common())


def _file(code: CodeType) -> str:
    return str(Path(code.co_filename).relative_to(ROOT))


def main() -> None:
    """Measure and write results/step_calls.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draft-model", default="demo")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    speculation: dict[str, Any] = {"method": "draft_model", "model": arguments.draft_model, "num_speculative_tokens": 5}
    llm = LLM(arguments.model, speculative_config=speculation)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    steps = calls_of_steps(llm, params, arguments.steps)
    totals = [sum(calls.values()) for calls in steps]
    usual = next(calls for calls, total in zip(steps, totals, strict=True) if total >= median(totals))
    files = by_name(calls_of_request(llm, SamplingParams(temperature=0, max_tokens=64)), _file)
    figures = {
        "calls_per_step": {"median": median(totals), "fewest": min(totals), "most": max(totals)},
        "files": len(files),
        "calls_of_a_request_by_file": files,
        "calls_of_a_step": by_name(usual, lambda code: f"{_file(code)} {code.co_qualname}"),
    }
    write("step_calls", PREDICTED, figures)


if __name__ == "__main__":
    main()
