"""Completion at the cursor: holes of a small file, filled with speculation, without, and by llama.cpp's server.

MODEL is a GGUF file of a model with marks for filling in the middle. It is served by `speculant serve` and, with
--llama-cpp (a folder of llama.cpp's programs), by llama-server with as many threads; both read the same requests to
/infill. The holes are our own and have one right text each. An answer is right if it is this text, without blanks at
its ends; `first_line` compares the first line only. All ways are greedy, and end where the model ends.

Each round fills the next hole in every way; the ways take turns, every other round backwards. A prompt is new to a
server each time (a salt of its own; for llama.cpp, `cache_prompt` is off). With --typing, the servers have seen the
prompt without its last character before, as after a key was pressed. Times are a client's: from sending a request to
the first piece of text, and to the end. The spreads are quartiles over rounds, and so over holes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.append(str(Path(__file__).parents[1]))  # for the script's neighbours, however it is started

from speculant.lab.bench import Benchmark, interleave, plain_values, ratios, spreads

TOKENS = 32
SPECULATING, PLAIN, PEER = "speculation", "plain", "llama.cpp"
PORT = 18_477
STARTS_S = 120.0

SHAPES = '''"""Shapes in a plane, and sums over them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Circle:
    """A circle around a point."""

    x: float
    y: float
    radius: float

    def area(self) -> float:
        return math.pi * self.radius ** 2

    def circumference(self) -> float:
        return 2 * math.pi * self.radius


@dataclass(frozen=True)
class Rectangle:
    """A rectangle with a corner at a point."""

    x: float
    y: float
    width: float
    height: float

    def area(self) -> float:
        return self.width * self.height

    def circumference(self) -> float:
        return 2 * (self.width + self.height)


def total_area(shapes: list[Circle | Rectangle]) -> float:
    """Return the sum of the areas."""
    total = 0.0
    for shape in shapes:
        total += shape.area()
    return total


def total_circumference(shapes: list[Circle | Rectangle]) -> float:
    """Return the sum of the circumferences."""
    total = 0.0
    for shape in shapes:
        total += shape.circumference()
    return total


def largest(shapes: list[Circle | Rectangle]) -> Circle | Rectangle:
    """Return the shape with the largest area."""
    return max(shapes, key=lambda shape: shape.area())


def smallest(shapes: list[Circle | Rectangle]) -> Circle | Rectangle:
    """Return the shape with the smallest area."""
    return min(shapes, key=lambda shape: shape.area())
'''
# Each hole: the text that is removed from the file, and the number of its occurrence, from 0
HOLES: tuple[tuple[str, int], ...] = (
    ("dataclass", 0),
    ("radius", 2),
    ("self.radius", 1),
    ("self.width * self.height", 0),
    ("(self.width + self.height)", 0),
    ("return total", 1),
    ("for shape in shapes:", 1),
    ("shape.circumference()", 0),
    ("    total = 0.0\n    for shape in shapes:\n        total += shape.circumference()\n", 0),
    ("list[Circle | Rectangle]", 3),
    ("-> float", 3),
    ("min(shapes, key=lambda shape: shape.area())", 0),
    ("smallest", 1),
    ("def area(self) -> float:", 1),
)


class Filled(NamedTuple):
    """An answer, and the seconds to its first piece and to its end."""

    text: str
    first_s: float
    whole_s: float


def holes() -> list[tuple[str, str, str]]:
    """Return for each hole the text before it, the text that was removed, and the text after it."""
    found = []
    for text, number in HOLES:
        start = -1
        for _ in range(number + 1):
            start = SHAPES.index(text, start + 1)
        found.append((SHAPES[:start], text, SHAPES[start + len(text) :]))
    return found


def fill(http: httpx.Client, body: dict[str, Any]) -> Filled:
    """Send a request, and return its answer."""
    started, first, pieces = time.perf_counter(), None, []
    with http.stream("POST", "/infill", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            sys.exit(f"{http.base_url} answered {response.status_code}: {response.read().decode()[:300]}")
        for line in response.iter_lines():
            if line.startswith("data: "):
                pieces.append(json.loads(line.removeprefix("data: ")))
                first = time.perf_counter() if first is None else first
    ended = time.perf_counter()
    return Filled("".join(piece["content"] for piece in pieces), (first or ended) - started, ended - started)


def figures(answer: Filled, number: int) -> dict[str, float]:
    """Return the figures of one round."""
    made, text = answer.text.strip(), holes()[number % len(HOLES)][1].strip()
    first_line = made.split("\n")[0] == text.split("\n")[0]
    return {"first_s": answer.first_s, "whole_s": answer.whole_s, "exact": made == text, "first_line": first_line}


class Way:
    """One way to fill holes, one after another. own: the fields of its requests, with a salt that no other one has."""

    def __init__(self, http: httpx.Client, own: Callable[[str], dict[str, Any]], typing: bool) -> None:
        self._http, self._own, self._typing, self._count = http, own, typing, -1

    def __call__(self) -> Filled:
        """Fill the next hole; the first call fills the last one."""
        before, _, after = holes()[self._count % len(HOLES)]
        body = {"input_prefix": before, "input_suffix": after, "temperature": 0, "n_predict": TOKENS}
        body |= {"samplers": ["temperature"], **self._own(f"{id(self)}{self._count}")}
        if self._typing:
            fill(self._http, {**body, "input_prefix": before[:-1], "n_predict": 1})
        self._count += 1
        return fill(self._http, body)


@contextmanager
def served(command: list[str], port: int) -> Iterator[httpx.Client]:
    """Start a server, and wait until it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=STARTS_S, trust_env=False) as http:
            deadline = time.monotonic() + STARTS_S
            while not _is_ready(http):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{command[0]} did not start: {' '.join(command)}")
                time.sleep(0.2)
            yield http
    finally:
        process.terminate()
        process.wait()


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def ways(arguments: argparse.Namespace) -> Iterator[dict[str, Way]]:
    """Start the servers, and return the ways by name."""
    make, model = partial(Way, typing=arguments.typing), str(arguments.model)
    ours = [
        sys.executable,
        "-m",
        "speculant.cli.main",
        "serve",
        model,
        "--port",
        str(PORT),
        "--max-model-len",
        "4096",
        "--no-find-drafts",
    ]
    with served(ours, PORT) as http:
        found = {
            SPECULATING: make(http, lambda salt: {"cache_salt": salt}),
            PLAIN: make(http, lambda salt: {"cache_salt": salt, "speculation": False}),
        }
        if arguments.llama_cpp is None:
            yield found
            return
        program = str(Path(arguments.llama_cpp) / "llama-server")
        theirs = [program, "-m", model, "--port", str(PORT + 1), "-c", "4096", "-t", str(arguments.threads), "-np", "1"]
        with served([*theirs, "--no-webui"], PORT + 1) as peer:
            yield {**found, PEER: make(peer, lambda _: {"cache_prompt": arguments.typing})}


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Fill the holes in all ways, in turn."""
    arguments.name += "_llama_cpp" * (arguments.llama_cpp is not None) + "_typing" * arguments.typing
    with ways(arguments) as found:
        for way in found.values():
            way()  # the first answer reads weights and measures costs
        runs = interleave(found, arguments.rounds, print)
    rounds = {name: [figures(run, number) for number, run in enumerate(each)] for name, each in runs.items()}
    yield {
        "model": Path(arguments.model).name,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        **{name: _summary(each) for name, each in rounds.items()},
        **{f"{name} / {SPECULATING}": plain_values(_times(ratios(rounds[name], rounds[SPECULATING])))
           for name in rounds if name != SPECULATING},
        "identical_texts": [each.text for each in runs[SPECULATING]] == [each.text for each in runs[PLAIN]],
        "wrong": {name: [run.text for run, each in zip(runs[name], rounds[name], strict=True) if not each["exact"]]
                  for name in runs},
    }  # fmt: skip


def _summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    counts = {name: sum(each[name] for each in rounds) for name in ("exact", "first_line")}
    return {**plain_values(_times(spreads(rounds))), **counts}


def _times(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.endswith("_s")}


BENCHMARK = Benchmark(
    __file__, __doc__,
    predicted="Of 14 holes at least 11 are right, in the same texts with and without speculation. Lookups make the "
    "whole time 0.85 of the plain one, as answers are short and most of the time is the prompt's. The first token "
    "comes in 0.8 of llama.cpp's time.",
    measure=measure, rounds=len(HOLES),
    options={"model": str, "llama_cpp": {"type": Path}, "threads": 2, "typing": False},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
