"""What one request may cost its neighbours: pairs of fields, with the processor time of each step as the oracle.

Fields that are harmless alone were costly together (drafts and forms, banned words and samples). So every pair of
settings is sent beside a neighbour. The server is a thread of this process: the time of its engine's steps is measured
where they run, as processor time, which other programs do not add to.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from speculant import AsyncEngine
from speculant.engine import Engine
from tests.examples import sizes
from tests.servers import LiveServer

STEP_S = 0.25  # of processor time: the bound of a neighbour's wait
ATTACKER, NEIGHBOUR = {"Authorization": "Bearer attacker"}, {"Authorization": "Bearer neighbour"}
KEYS = {f"key{number}": {"type": "string"} for number in range(6)}
SCHEMA = {"type": "object", "properties": KEYS, "required": [*KEYS]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}

FIELDS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "drafts": lambda chance: {"speculation": {"num_speculative_tokens": chance.choice([16, 100, 512])}},
    "form": lambda chance: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "choices": lambda chance: {"structured_outputs": {"choice": [f"answer {number}" for number in range(500)]}},
    "samples": lambda chance: {"n": chance.choice([16, 64, 128])},
    "bad words": lambda chance: {"bad_words": [[97] * chance.randint(1, 15) + [number] for number in range(1024)]},
    "allowed": lambda chance: {"allowed_token_ids": [97, *range(100, 220)]},
    "bias": lambda chance: {"logit_bias": {str(number): 1.0 for number in range(250)}},
    "penalties": lambda chance: {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stops": lambda chance: {"stop": ["a" * 62 + chr(33 + number) for number in range(64)]},
    "logprobs": lambda chance: {"logprobs": 100},
    "prompt logprobs": lambda chance: {"prompt_logprobs": 100, "prompt": "ab cd " * chance.choice([5, 80])},
    "beams": lambda chance: {"beam_width": chance.choice([16, 128]), "n": 1, "temperature": 0},
    "long prompt": lambda chance: {"prompt": "a word " * 150},
    "prompts": lambda chance: {"prompt": [f"{number} and " * 20 for number in range(16)]},
    "minimum": lambda chance: {"min_tokens": 40, "stop_token_ids": [*range(200)]},
    "seed": lambda chance: {"seed": 1, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "prediction": lambda chance: {"prediction": {"type": "content", "content": "a b c d e f " * 200}},
    "repetitive": lambda chance: {"prompt": "aaaa " * 40, "temperature": 0},
}
COSTLY = [  # took from 0.26 to 0.66 s a step when each field had a limit of its own
    *(("samples", "prompt logprobs"), ("samples", "beams"), ("penalties", "beams"), ("prompt logprobs", "beams")),
]


class Watch:
    """The longest processor time of the engine's steps, and of single calls in the server's event loop, in seconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.step_s = self.call_s = 0.0
        step, run = Engine.step, asyncio.Handle._run

        def timed_step(engine: Engine) -> Any:
            started = time.thread_time()
            try:
                return step(engine)
            finally:
                self.step_s = max(self.step_s, time.thread_time() - started)

        def timed_call(handle: asyncio.Handle) -> None:
            started = time.thread_time()
            try:
                run(handle)
            finally:
                self.call_s = max(self.call_s, time.thread_time() - started)

        patch.setattr(Engine, "step", timed_step)
        patch.setattr(asyncio.Handle, "_run", timed_call)

    def reset(self) -> None:
        """Begin anew."""
        self.step_s = self.call_s = 0.0


@pytest.fixture(scope="module")
def watched() -> Iterator[tuple[LiveServer, Watch]]:
    """Return a server of the embedded pair, which has room for 128 sequences, and the watch over its threads."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        engine = AsyncEngine("demo", draft_model="demo", max_num_seqs=128)
        live = LiveServer(engine, api_keys=("attacker", "neighbour")).ready()
        yield live, watch
        live.stop()


@contextmanager
def beside_a_neighbour(server: LiveServer) -> Iterator[list[float]]:
    """Send small requests of another client, one after another; yield their times."""
    over, times = threading.Event(), list[float]()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, verify=False) as client:
            while not over.is_set():
                started = time.perf_counter()
                body = {"prompt": "def f(", "max_tokens": 4, "temperature": 0, "speculation": False}
                assert client.post("/v1/completions", json=body, headers=NEIGHBOUR).status_code == 200
                times.append(time.perf_counter() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


def pairs(count: int) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield bodies with two of the fields, every pair once before any comes again, costly ones first."""
    chance = random.Random(0)
    names = [*itertools.combinations(FIELDS, 2)]
    while True:
        chance.shuffle(names)
        for pair in sorted(names, key=lambda pair: pair not in COSTLY):
            if not count:
                return
            count -= 1
            body = {"prompt": "def f(x):", "max_tokens": chance.choice([4, 24]), "temperature": 1.0}
            for name in pair:
                body |= FIELDS[name](chance)
            yield pair, body


@pytest.mark.parametrize("count", sizes(8, 160))
def test_no_pair_of_fields_makes_a_step_long(watched: tuple[LiveServer, Watch], count: int) -> None:
    server, watch = watched
    statuses, longest = Counter[int](), Counter[tuple[str, ...]]()
    client = httpx.Client(base_url=server.url, timeout=120, trust_env=False, verify=False)
    with client, beside_a_neighbour(server) as waits:
        for pair, body in pairs(count):
            watch.reset()
            statuses[client.post("/v1/completions", json=body, headers=ATTACKER).status_code] += 1
            longest[pair] = max(longest[pair], watch.step_s, watch.call_s)
    print(f"{count} requests, {dict(statuses)}; the longest: {longest.most_common(8)}")
    print(f"{len(waits)} answers to the neighbour, the slowest after {max(waits):.3f} s")
    assert not any(status >= 500 for status in statuses)
    assert longest.most_common(1)[0][1] < STEP_S
