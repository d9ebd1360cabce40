"""Threads and garbage collections that wait until an engine has started."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread

_waiting = ContextVar[list[Thread] | None]("waiting", default=None)


def start(thread: Thread) -> None:
    """Start a thread: at once, or at the end of the `postponed` block that the caller runs in."""
    if (waiting := _waiting.get()) is None:
        thread.start()
    else:
        waiting.append(thread)


@contextmanager
def postponed() -> Iterator[None]:
    """Start the threads that are passed to `start` within the block at its end, even if it raises."""
    token = _waiting.set(waiting := list[Thread]())
    try:
        yield
    finally:
        _waiting.reset(token)
        for thread in waiting:
            thread.start()


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage within the block: torch and a vocabulary are a million objects, all of them in use."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
