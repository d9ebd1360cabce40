"""How much of the package a step and a request pass: Python calls, and files. benchmarks/step_calls.py prints it.

Greedy, batch 1, the embedded pair. Counted are calls of the package's own functions in the thread of `LLM.generate`:
for each step once the request decodes, and the files of all calls from the prompt to the text.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import CodeType, FrameType, MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import speculant
from speculant import LLM, SamplingParams

ROOT = Path(speculant.__file__).parent
PROMPT = "def read(path):\n"
WARM, STEPS, TOKENS = 5, 50, 64
TICK_S = 2**-10  # between two readings of the clock; a power of two, so that differences of readings are exact
SETTINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "plain": {"use_speculative_decoding": False},
        "fixed": {"draft_model": "demo", "spec_length": 5},
        "default": {"draft_model": "demo"},
    }
)
Calls = Counter[CodeType]


class Counted(NamedTuple):
    """The calls of each step, and those of a request from its prompt to its text."""

    steps: list[Calls]
    request: Calls

    @property
    def totals(self) -> list[int]:
        """The number of calls of each step."""
        return [calls.total() for calls in self.steps]

    @property
    def usual(self) -> Calls:
        """The calls of the first step that has at least the median's."""
        return next(calls for calls in self.steps if calls.total() >= median(self.totals))

    @property
    def files(self) -> dict[str, int]:
        """The number of the request's calls by file, most first."""
        return by_name(self.request, file_of)


def count_calls(setting: Mapping[str, Any], model: str = "demo", steps: int = STEPS) -> Counted:
    """Count the calls of an engine with a setting. The same code has the same counts, on any machine.

    The clock goes on by a tick whenever it is read. So draft lengths, which depend on times, are the same too.
    """
    clock = map(TICK_S.__mul__, count())
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch("time.perf_counter", clock.__next__),
    ):
        llm = LLM(model, **setting)
        _request(llm)  # it imports what is imported on first use
        return Counted(_steps(llm, steps), _request(llm))


def by_name(calls: Calls, name: Callable[[CodeType], str]) -> dict[str, int]:
    """Return numbers of calls by a name of their function, most first."""
    named = Counter[str]()
    for code, number in calls.items():
        named[name(code)] += number
    return dict(named.most_common())


def file_of(code: CodeType) -> str:
    """Return the path of a function's file within the package."""
    return str(Path(code.co_filename).relative_to(ROOT))


def _steps(llm: LLM, steps: int) -> list[Calls]:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    llm.engine.add_request(llm.tokenizer.encode(PROMPT), params, "steps")
    for _ in range(WARM):
        llm.engine.step()
    found = list[Calls]()
    for _ in range(steps):
        with _counted() as calls:
            llm.engine.step()
        found.append(calls)
    llm.engine.abort("steps")
    return found


def _request(llm: LLM) -> Calls:
    with _counted() as calls:
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=TOKENS))
    return calls


@contextmanager
def _counted() -> Iterator[Calls]:
    """Count the calls of the package's functions in this thread."""
    calls = Calls()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            calls[frame.f_code] += 1

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(before)
