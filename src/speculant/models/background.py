"""Work that waits until an engine stands: while it starts, costs are measured, and nothing else may run beside that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread

_waiting = ContextVar[list[Thread] | None]("waiting", default=None)


def start(thread: Thread) -> None:
    """Start a thread: at once, or where `postponed` says so, later."""
    if (waiting := _waiting.get()) is None:
        thread.start()
    else:
        waiting.append(thread)


@contextmanager
def postponed() -> Iterator[None]:
    """Let threads that `start` is given within the block begin when it ends, also when it raises."""
    token = _waiting.set(waiting := list[Thread]())
    try:
        yield
    finally:
        _waiting.reset(token)
        for thread in waiting:
            thread.start()
