"""Bounds on the work for clients: threads in which they take turns, and the time that their forms may take.

Masks are computed in the step of all sequences, so a slow one delays every other sequence of the batch. The library
bounds the work of one call; this bounds the sum of calls. It counts processor time of the calling thread, so that a
busy machine ends no request. But the time for which a hypervisor stops the machine counts too. So before a form is
refused, its longest call is excused, once per client in `REFUSED_S`. A form takes at most, beyond `FREE_S` per call,

    SPARE_S                         (a fifth of that while its client is over its share)
    + the call that exceeds it
    + one call, for one form of the client in REFUSED_S
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from speculant.errors import ConstraintError

T = TypeVar("T")


class LaneFullError(Exception):
    """A client has as many pieces of work in a lane as it may have there."""


class LaneClosedError(Exception):
    """A lane takes no more work."""


class ClientLane:
    """Does work in threads. A client's pieces of work wait for each other, not for other clients' work.

    One of each client is done at a time; without a name it is no single client, and may have all threads. Any thread
    may use a lane.
    """

    def __init__(
        self,
        name: str,
        num_threads: int = 1,
        stack_bytes: int = 0,
        most: int | None = None,
        longest_rest: float = 0.0,
    ) -> None:
        """num_threads: pieces of work that are done at a time. stack_bytes: of each; 0 = the system's default.

        most: pieces of work that one client may have here, waiting and begun; None = any number. longest_rest: after
        each piece the thread pauses for as long as the piece took, up to this many seconds. Without pauses, work that
        holds the interpreter's lock would leave no time for the engine and the event loop.
        """
        self._num_threads, self._stack_bytes, self._most = num_threads, stack_bytes, most
        self._longest_rest = longest_rest
        self._queues: OrderedDict[str, dict[Future[Any], Callable[[], Any]]] = OrderedDict()  # the next turn is first
        self._running, self._held = Counter[str](), Counter[str]()  # pieces by client: begun, and not ended
        self._lock, self._started, self._closed = threading.Lock(), False, False
        self._pool = ThreadPoolExecutor(num_threads, name)

    def submit(self, client: str, work: Callable[[], T]) -> Future[T]:
        """Return the future result of a client's work. Work that is cancelled before it begins never runs.

        Raises LaneFullError if the client has too much work here, and LaneClosedError after `close`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise LaneClosedError
            if self._most is not None and self._held[client] >= self._most:
                raise LaneFullError
            if not self._started:
                self._start()
            self._pool.submit(self._run)
            self._queues.setdefault(client, {})[future] = work
            self._held[client] += 1
        future.add_done_callback(partial(self._forget, client))
        return future

    @property
    def is_busy(self) -> bool:
        """Whether work waits or is being done."""
        return bool(self._held)

    def close(self) -> None:
        """Cancel the work that has not begun, and end the threads after the work that has."""
        with self._lock:
            self._closed = True
            waiting = [future for each in self._queues.values() for future in each]
        for future in waiting:
            future.cancel()
        self._pool.shutdown(wait=False)

    def _forget(self, client: str, future: Future[Any]) -> None:
        """Forget work that has ended or was cancelled."""
        with self._lock:
            self._held -= Counter((client,))
            queue = self._queues.get(client, {})
            if queue.pop(future, None) is not None and not queue:
                del self._queues[client]

    def _run(self) -> None:
        """Work until nothing may begin: the thread that ends a client's piece takes its next one."""
        while (taken := self._take()) is not None:
            client, future, work = taken
            if future.set_running_or_notify_cancel():
                self._do(future, work)
            with self._lock:
                self._running -= Counter((client,))

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._lock:
            for client, queue in self._queues.items():
                if self._running[client] < (1 if client else self._num_threads):
                    self._running[client] += 1
                    future = next(iter(queue))
                    work = queue.pop(future)
                    self._queues.move_to_end(client)
                    if not queue:
                        del self._queues[client]
                    return client, future, work
        return None

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)
        if self._longest_rest:
            time.sleep(min(time.monotonic() - began, self._longest_rest))

    def _start(self) -> None:
        """Start the threads, all of which have the size of stack that is set meanwhile."""
        all_there, before = threading.Barrier(self._num_threads), threading.stack_size(self._stack_bytes)
        try:
            list(self._pool.map(lambda _: all_there.wait(), range(self._num_threads)))
            self._started = True
        finally:
            threading.stack_size(before)
            all_there.abort()  # if one could not be started, the others wait no longer


FREE_S = 5e-4  # of each call; masks over 120,000 tokens usually take 0.1 ms
SPARE_S = 0.05  # that all calls for one form may take beyond that
SLOW_S = 1e-3  # a call that takes longer counts among its client's slow calls
CLIENT_SPARE_S = 0.05  # of slow calls in a row
CLIENT_SHARE = 0.1  # of the time that passes, for slow calls
REFUSED_S = 600.0  # for which a form that took too long is refused; in which one call of a client is excused

Clock = Callable[[], float]


class ClientTime:
    """The processor time of one client's slow calls, for all of its forms."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock, self._spent_s, self._at = clock, 0.0, clock()
        self._excused_until = self._at

    def spend(self, seconds: float) -> None:
        """Count one call."""
        if seconds > SLOW_S:
            self._spent_s, self._at = self._left() + seconds, self._clock()

    def excuse(self, seconds: float) -> bool:
        """Take back one call, which `spend` has counted. Return False if another one was excused lately."""
        if self._clock() < self._excused_until:
            return False
        self._excused_until = self._clock() + REFUSED_S
        if seconds > SLOW_S:
            self._spent_s, self._at = max(0.0, self._left() - seconds), self._clock()
        return True

    @property
    def is_over(self) -> bool:
        """Whether the client's slow calls took more than their share of the last seconds."""
        return self._left() > CLIENT_SPARE_S

    def _left(self) -> float:
        return max(0.0, self._spent_s - CLIENT_SHARE * (self._clock() - self._at))


class Allowance:
    """The processor time of one client's form, for all sequences of that client that have the form.

    A call beyond `FREE_S` uses up spare time, and a shorter one gives some back. Without spare time the form is
    refused, sooner if its client has other slow forms. Before that, its longest call is excused, once for all forms of
    the client.
    """

    def __init__(self, client: ClientTime, clock: Clock = time.monotonic) -> None:
        self._client, self._clock, self._over_s = client, clock, 0.0
        self._longest_s = 0.0  # of the calls that used up spare time
        self._until: float | None = None

    def spend(self, seconds: float) -> None:
        """Count one call."""
        self._over_s = max(0.0, self._over_s + seconds - FREE_S)
        self._longest_s = max(self._longest_s, seconds) if self._over_s else 0.0
        self._client.spend(seconds)
        if self._is_over and self._client.excuse(self._longest_s):
            self._over_s, self._longest_s = max(0.0, self._over_s + FREE_S - self._longest_s), 0.0
        if self._is_over:
            self._until = self._clock() + REFUSED_S

    @property
    def _is_over(self) -> bool:
        return self._over_s > SPARE_S or (self._over_s > SPARE_S / 5 and self._client.is_over)

    @property
    def refusal(self) -> ConstraintError | None:
        """The error of the form's requests if it took too long; None = it may be used."""
        if self._until is None:
            return None
        if self._clock() > self._until:
            self._over_s, self._longest_s, self._until = 0.0, 0.0, None
            return None
        return ConstraintError(
            f"the form of this request is slow: finding the tokens that may come next took {1000 * SPARE_S:.0f} ms of "
            f"processor time in excess of {1000 * FREE_S:.1f} ms each",
            "simplify it: fewer alternatives that begin alike, shorter repetitions, smaller bounds.",
        )
