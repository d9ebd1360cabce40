"""One engine for the threads of several callers: any of them steps it, and each caller gets its own results."""

from __future__ import annotations

import collections.abc
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from speculant.engine.engine import Engine
from speculant.engine.generation import Generation, StreamPiece
from speculant.text.tokenizer import Tokenizer
from speculant.types import StepOutput


class SharedEngine:
    """Runs generations of any number of threads in one batch. Callers that wait run the steps; it starts no thread.

    A thread has the engine for one step, or to add requests. Waiting threads take turns, so that none of them is kept
    out by one that steps again and again.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._turn = _Turn(self._abort)
        self._receivers: dict[str, Callable[[StepOutput], None]] = {}  # by request id

    def check(self, generations: Iterable[Generation]) -> None:
        """Raise what `run` would raise for the first generation that can't be served."""
        with self._turn:
            for generation in generations:
                generation.check(self._engine)

    def run(self, waiting: deque[Generation]) -> collections.abc.Generator[tuple[int, Generation], None, None]:
        """Run generations together; yield each as it ends, with its number, and keep nothing of it.

        They are queued, and taken out of `waiting`, as the engine has places for them. Closing the iterator aborts
        what runs. Raises what `Engine.add_request` does.
        """
        running, ended, count = dict[int, Generation](), deque[int](), 0
        try:
            while waiting or running:
                with self._turn:
                    while waiting and self._has_place(waiting[0]):
                        generation = running[count] = waiting.popleft()
                        self._start(generation, _end_noted(generation, count, ended))
                        count += 1
                    if not ended:
                        self._step()
                while ended:
                    number = ended.popleft()
                    self._leave(running[number])
                    yield number, running.pop(number)
        finally:
            for generation in running.values():
                self._leave(generation)

    def stream(self, generation: Generation) -> collections.abc.Generator[StreamPiece, None, None]:
        """Yield each token of a generation as it is committed; closing the iterator aborts it.

        Raises what `Engine.add_request` does, and after the last piece what the generation ended with.
        """
        unread = deque[StreamPiece | Exception]()
        with self._turn:
            self._start(generation, _piece_noted(generation, unread))
        try:
            while self._advance(generation, unread):
                while unread:
                    item = unread.popleft()
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            self._leave(generation)
        if generation.error is not None:
            raise generation.error

    def _advance(self, generation: Generation, unread: deque[StreamPiece | Exception]) -> bool:
        """Step if nothing is unread, and say whether there is or will be more of a generation."""
        with self._turn:
            if not unread and not generation.finished:
                self._step()
            return bool(unread) or not generation.finished

    def _has_place(self, generation: Generation) -> bool:
        """Whether a generation can be queued; in an empty engine it can, or raises the reason."""
        return self._engine.accepts(generation.params.n) or not self._engine.has_unfinished()

    def _start(self, generation: Generation, receive: Callable[[StepOutput], None]) -> None:
        generation.start(self._engine, self._tokenizer)
        self._receivers[generation.request_id] = receive

    def _step(self) -> None:
        for output in self._engine.step():
            receive = self._receivers.get(output.request_id)
            if receive is not None:
                receive(output)

    def _leave(self, generation: Generation) -> None:
        """Forget a generation, and end it before the next step if it has not ended."""
        self._receivers.pop(generation.request_id, None)
        if not generation.finished:
            self._turn.postpone(generation)

    def _abort(self, generation: Generation) -> None:
        self._engine.abort(generation.request_id)


class _Turn:
    """A lock that waiting threads get one after the other, and work that is done when it is free.

    `threading.Lock` alone may be taken again by the thread that has just released it. So a thread queues for it in
    `_next`, and only the first one of the queue waits for `_lock`.

    A generator's end may run anywhere, by the garbage collector even inside of a step; so `postpone` waits for no lock.
    """

    def __init__(self, work: Callable[[Generation], None]) -> None:
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._work, self._postponed = work, deque[Generation]()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
        self._do_postponed()

    def postpone(self, generation: Generation) -> None:
        """Do the work for a generation: at once if the lock is free, else as soon as it is."""
        self._postponed.append(generation)
        self._do_postponed()

    def _do_postponed(self) -> None:
        while self._postponed and self._lock.acquire(blocking=False):
            try:
                while self._postponed:
                    self._work(self._postponed.popleft())
            finally:
                self._lock.release()


def _end_noted(generation: Generation, number: int, ended: deque[int]) -> Callable[[StepOutput], None]:
    """Return a receiver that notes the end of a generation's last sample."""
    left = generation.params.n

    def receive(output: StepOutput) -> None:
        nonlocal left
        left -= output.finish_reason is not None
        if not left:
            ended.append(number)

    return receive


def _piece_noted(generation: Generation, unread: deque[StreamPiece | Exception]) -> Callable[[StepOutput], None]:
    """Return a receiver that makes the pieces of a generation; text that can't be made is an error for its reader."""

    def receive(output: StepOutput) -> None:
        try:
            unread.append(generation.piece(output))
        except Exception as error:  # noqa: BLE001 - it is not the error of the thread that happens to step
            unread.append(error)

    return receive
