"""Fake engines behind a router, to compare `speculant plan fleet` with: each step only sleeps for its time.

They share no code with the simulator. Each engine is a task of asyncio: while it has requests, it makes steps, and a
step sleeps. Prompts, answers, drafts and their acceptance are counted; no model runs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Machine:
    """What a step costs: points of (rows, seconds), and a draft token's share of a pass; acceptance and limits."""

    points: tuple[tuple[int, float], ...]
    cost_ratio: float
    alpha: float
    slots: int
    budget: int
    block: int = 16

    def step(self, rows: int, drafting: int, length: int) -> float:
        """Return the seconds of a step."""
        sizes, seconds = zip(*self.points, strict=True)
        return float(np.interp(rows, sizes, seconds) + length * self.cost_ratio * np.interp(drafting, sizes, seconds))


@cache
def best_length(machine: Machine, sequences: int, prompt_rows: int, prompts: int) -> int:
    """Return the draft length with the most expected tokens per second."""
    best, most = 0, 0.0
    for length in range(17):
        rows = prompt_rows + sequences * (1 + length)
        if rows > machine.budget:
            break
        tokens = sequences * sum(machine.alpha**k for k in range(length + 1)) + prompts
        speed = tokens / machine.step(rows, sequences, length)
        if speed > most:
            best, most = length, speed
    return best


@dataclass(eq=False)
class Asked:
    """A request. due, first, ended: readings of the loop's clock."""

    prompt: int
    answer: int
    prefix: Any
    shared: int
    due: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    todo: int = -1  # prompt tokens; -1 = not begun
    known: int = 0  # prompt tokens that were computed before
    written: int = 0
    drafted: bool = False


@dataclass
class TimedEngine:
    """One engine: `asked` are its requests, oldest first, of which the first `slots` run."""

    machine: Machine
    rng: random.Random
    asked: list[Asked] = field(default_factory=list)
    prefixes: set[Any] = field(default_factory=set)
    work: asyncio.Event = field(default_factory=asyncio.Event)
    steps: int = 0
    late: float = 0.0  # seconds by which steps took longer than they should

    def submit(self, request: Asked) -> None:
        """Queue a request."""
        self.asked.append(request)
        self.work.set()

    async def serve(self) -> None:
        """Make steps for ever."""
        while True:
            await self.work.wait()
            while self.asked:
                await self._step()
            self.work.clear()

    async def _step(self) -> None:
        started, running, machine = time.monotonic(), self.asked[: self.machine.slots], self.machine
        writing = [each for each in running if each.written]
        left, feeding = machine.budget - len(writing), list[tuple[Asked, int]]()
        for each in running:
            if each.written:
                continue
            if each.todo < 0 or each.todo == each.prompt:
                known = each.shared // machine.block * machine.block if each.prefix in self.prefixes else 0
                each.known = min(known, each.prompt - 1)
                each.todo = each.prompt - each.known
            if count := min(each.todo, left):
                feeding.append((each, count))
                left -= count
        fed = sum(count for _, count in feeding)
        length = best_length(machine, len(writing), fed, len(feeding)) if writing else 0
        drafts = {id(each): min(length, each.answer - each.written - 1) for each in writing}
        drafting = [each for each in writing if drafts[id(each)]]
        seconds = machine.step(
            fed + len(writing) + sum(drafts.values()), len(drafting), max(drafts.values(), default=0)
        )
        for each in drafting:
            if not each.drafted:  # the draft model reads the prompt
                each.drafted = True
                unread = each.prompt - each.known
                seconds += machine.cost_ratio * machine.step(min(unread, machine.budget), 0, 0)
        await asyncio.sleep(seconds)
        self._commit(writing, drafts, feeding)
        self.steps += 1
        self.late += time.monotonic() - started - seconds

    def _commit(self, writing: list[Asked], drafts: dict[int, int], feeding: list[tuple[Asked, int]]) -> None:
        now = asyncio.get_running_loop().time()
        for each in writing:
            each.written += 1
            for _ in range(drafts[id(each)]):
                if self.rng.random() >= self.machine.alpha:
                    break
                each.written += 1
        for each, count in feeding:
            each.todo -= count
            if each.prefix is not None and each.todo <= each.prompt - each.shared:
                self.prefixes.add(each.prefix)
            if not each.todo:
                each.written, each.first = 1, now
        for each in [*writing, *(each for each, _ in feeding)]:
            if each.written >= each.answer:
                each.ended = now
                self.asked.remove(each)


async def run_fakes(
    machine: Machine, replicas: int, requests: Sequence[Asked], dues: Sequence[float], routing: str, seed: str
) -> tuple[list[Asked], float]:
    """Send each request to an engine at its due time, and wait until all are answered.

    Return the requests, and the mean time by which a step took longer than it should.
    """
    rng, loop = random.Random(f"{seed}, fakes"), asyncio.get_running_loop()
    engines = [TimedEngine(machine, random.Random(f"{seed}, fake {number}")) for number in range(replicas)]
    tasks = [asyncio.create_task(engine.serve()) for engine in engines]
    started = loop.time()
    for request, due in zip(requests, dues, strict=True):
        await asyncio.sleep(max(0.0, started + due - loop.time()))
        request.due = started + due
        if routing == "random":
            rng.choice(engines).submit(request)
        else:
            fewest = min(len(engine.asked) for engine in engines)
            rng.choice([engine for engine in engines if len(engine.asked) == fewest]).submit(request)
    while any(engine.asked for engine in engines):
        await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    return list(requests), sum(each.late for each in engines) / sum(each.steps for each in engines)
