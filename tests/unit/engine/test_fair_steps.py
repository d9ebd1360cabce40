"""Engines that share a machine: one steps at a time, and those that have work get equal time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from speculant.engine import FairSteps


class Steps:
    """An engine in a thread that takes steps of `seconds` until it is over. `used`: the time of its steps."""

    def __init__(self, shared: FairSteps, seconds: float, running: list[Steps]) -> None:
        self.used, self.steps, self._over = 0.0, 0, False
        self._shared, self._seconds, self._running = shared, seconds, running
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            with self._shared.turn(self, lambda: not self._over):
                started = time.perf_counter()
                self._running.append(self)
                time.sleep(self._seconds)
                assert self._running == [self], "two engines step at once"
                self._running.clear()
                self.used += time.perf_counter() - started
                self.steps += 1

    def end(self) -> None:
        self._over = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "an engine waits for a turn that nobody has"


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_engines_with_long_and_short_steps_get_equal_time() -> None:
    shared, running = FairSteps(), list[Steps]()
    long, short = Steps(shared, 0.02, running), Steps(shared, 0.001, running)
    until(lambda: long.steps > 10 and short.steps > 10)
    ratio, counts = long.used / short.used, (long.steps, short.steps)
    short.end()
    alone = long.steps
    until(lambda: long.steps > alone + 3)  # it goes on
    long.end()
    assert 0.6 < ratio < 1.6, (ratio, counts)
    assert counts[1] > 3 * counts[0], "an engine with short steps takes more of them"


def test_a_newcomer_starts_at_the_level_of_the_others() -> None:
    shared, running = FairSteps(), list[Steps]()
    first = Steps(shared, 0.005, running)
    until(lambda: first.used > 0.3)
    before, newcomer = first.steps, Steps(shared, 0.005, running)
    until(lambda: newcomer.steps > 10)
    during = first.steps - before
    first.end()
    newcomer.end()
    assert during >= 5, "the newcomer made up for the time before it came"


def test_an_engine_that_fails_or_ends_gives_its_turn_up() -> None:
    shared, engines = FairSteps(), [threading.Event() for _ in range(3)]
    numbers = count()
    with pytest.raises(ZeroDivisionError), shared.turn(engines[0], lambda: True):
        raise ZeroDivisionError
    with shared.turn(engines[1], lambda: True):  # and keeps the turn, as it has more work
        next(numbers)
    shared.leave(engines[1])
    shared.leave(engines[2])  # has none
    with shared.turn(engines[2], lambda: False):
        next(numbers)
    assert next(numbers) == 2


def test_idle_turns_take_nothing_from_engines_with_work() -> None:
    shared, running, idle = FairSteps(), list[Steps](), object()
    busy = Steps(shared, 0.002, running)
    until(lambda: busy.steps > 2)
    for _ in range(20):
        with shared.idle_turn(idle, 0.005) as its_turn:
            assert not its_turn
    busy.end()
    with shared.idle_turn(idle, 10) as its_turn:
        assert its_turn
        late = Steps(shared, 0.002, running)
        time.sleep(0.02)
        assert not late.steps, "it steps beside the idle engine"
    until(lambda: late.steps > 2)
    late.end()


def test_an_engine_that_becomes_idle_gives_up_its_turn() -> None:
    shared, running, engine = FairSteps(), list[Steps](), threading.Event()
    with shared.turn(engine, lambda: True):
        pass
    other = Steps(shared, 0.001, running)
    for _ in range(5):
        with shared.idle_turn(engine, 0.01):
            pass
    until(lambda: other.steps > 2)
    other.end()
