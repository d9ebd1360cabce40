"""Processor time of a call, for tests that tell linear work from quadratic work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def cpu_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the least processor time of this thread over a few calls, without garbage collection.

    Other programs, and collections of what other tests left, can only add time.
    """
    gc.disable()
    try:
        return min(_timed(call) for _ in range(repeats))
    finally:
        gc.enable()


def is_within(bound_s: float, call: Callable[[], object], repeats: int = 3) -> bool:
    """Whether the least processor time of a few calls is below a bound; after the first one that is, none follows."""
    gc.disable()
    try:
        return any(_timed(call) < bound_s for _ in range(repeats))
    finally:
        gc.enable()


def _timed(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started
