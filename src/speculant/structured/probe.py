"""A process that compiles forms to see whether they keep within limits: a hostile form harms this process alone.

    the server             a socket for each form  --->  this process, which has one thread
    this process           forks a child for each form, which inherits the vocabulary
    the child              reads form and limits from the socket, compiles, answers, ends

A child that exceeds its limits answers so. If it can't, because the library does not return to Python or memory is used
up, the system ends it, and the socket closes after the "+" that the child sent before.

It imports neither torch nor the engine: it has only the grammar library and the vocabulary in memory.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from speculant.errors import CapacityError
from speculant.structured.library import STRANGERS, compute_beginning, make_matcher, read_definition
from speculant.structured.spec import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20  # of a thread that compiles: the compiler recurses once per rule of a chain of rules
_TICK_S = 0.005  # between two looks at the limits
_MARGIN = 2  # the system ends a child at this multiple of its limits
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of ru_maxrss
START_S = 60.0  # seconds in which the process must have read the vocabulary
_PATIENCE = 30  # a probe may wait this many times as long for a processor as it may use one
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # a process with threads should not fork


class ProbeLimits(NamedTuple):
    """Processor time and memory that compiling a form may take. niceness: added to the child's, so it has less time."""

    seconds: float
    num_bytes: int
    niceness: int = 0


@dataclass(frozen=True)
class Probed:
    """The outcome of a probe.

    exceeded: the limit that the form exceeds: "time", "memory", "step" (a limit of the library's), or "limits" if the
    limit is unknown; empty = none. error: the library's reason, if it refused the form. num_bytes: the memory that
    compiling the form took.
    """

    exceeded: str = ""
    error: str = ""
    num_bytes: int = 0


def serve(requests: socket.socket) -> None:
    """Read the vocabulary, then fork a child for each socket that arrives, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes children that have ended
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # without memory, the system ends this process and its children first
    given = receive(requests)
    tokens = read_definition(given["tokenizer"], given["size"], given["ends"])
    gc.disable()  # a collection would touch, and so copy, the memory that children share
    requests.sendall(b"+")
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            answer(socket.socket(fileno=descriptors[0]), tokens)
        os.close(descriptors[0])


def answer(channel: socket.socket, tokens: LLTokenizer) -> NoReturn:
    """Compile the form that a socket brings, and end this process at once. Sends "+", then a `Probed` as JSON."""
    try:
        form, limits = receive(channel)
        channel.sendall(b"+")
        probed = examine(GrammarSource(*form), ProbeLimits(*limits), tokens)
        channel.sendall(json.dumps(vars(probed)).encode())
    finally:
        os._exit(0)


def examine(source: GrammarSource, limits: ProbeLimits, tokens: LLTokenizer) -> Probed:
    """Compile a form in a thread of this process, and return when it is done or exceeds a limit."""
    os.nice(limits.niceness)
    signal.setitimer(signal.ITIMER_PROF, _MARGIN * limits.seconds)  # whose signal ends this process
    before = _peak_bytes()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        address_space = _address_space() + STACK_BYTES + _MARGIN * limits.num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (address_space, most))
    results = list[Probed]()
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: results.append(_compile(tokens, source)), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_TICK_S)
        if time.process_time() > limits.seconds:
            return Probed("time")
        if _peak_bytes() - before > limits.num_bytes:
            return Probed("memory")
    return replace(results[0], num_bytes=_peak_bytes() - before)


def _compile(tokens: LLTokenizer, source: GrammarSource) -> Probed:
    """Compile a form. One for which the library raises an error is left to the caller, who gets the same error."""
    try:
        matcher = make_matcher(tokens, source, STRANGERS)
        if matcher.is_error():
            return Probed(error=matcher.get_error())
        compute_beginning(matcher)
        return Probed("step", matcher.get_error()) if matcher.is_error() else Probed()
    except BaseException:  # noqa: BLE001 - panics of the library are no Exceptions
        return Probed()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


def _address_space() -> int:
    """Return the bytes of address space in use. Raises OSError where the system does not tell."""
    with open("/proc/self/statm") as facts:
        return int(facts.read().split()[0]) * resource.getpagesize()


def send(channel: socket.socket, value: Any) -> None:
    """Send a value as a line of JSON."""
    channel.sendall(json.dumps(value).encode() + b"\n")


def receive(channel: socket.socket) -> Any:
    """Return the value that `send` sent; nothing may follow it before an answer. Raises EOFError if it is cut short."""
    with channel.makefile("rb") as lines:
        line = lines.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the other end of a socket is closed")
    return json.loads(line)


class Prober:
    """Owns the process, which starts with the first probe and ends with this object. Any thread may use it."""

    def __init__(self, definition: str, size: int, end_token_ids: Collection[int]) -> None:
        """definition: the content of a tokenizer.json. size: tokens in the vocabulary."""
        self._vocabulary = {"tokenizer": definition, "size": size, "ends": sorted(end_token_ids)}
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None

    def probe(self, source: GrammarSource, limits: ProbeLimits) -> Probed:
        """Compile a form in a child of the process, within limits. Raises CapacityError if there is no process."""
        here, there = socket.socketpair()
        with here:
            with there:
                self._pass_on(there)
            here.settimeout(_PATIENCE * (1 + limits.seconds))
            try:
                send(here, (tuple(source), tuple(limits)))
                answer = b"".join(iter(lambda: here.recv(65536), b""))
            except TimeoutError:
                return Probed("time")
            except ConnectionError:
                answer = b""
        if not answer:
            raise CapacityError("the process that checks forms has ended", "try again.")
        return Probed(**json.loads(answer[1:])) if answer[1:] else Probed("limits")

    def _pass_on(self, channel: socket.socket) -> None:
        """Give a socket to the process. If it has died, start another one."""
        with self._lock:
            for _ in range(2):
                try:
                    if self._requests is None:
                        self._requests = self._start()
                    socket.send_fds(self._requests, [b"+"], [channel.fileno()])
                except (OSError, EOFError) as error:
                    logger.warning("the process that checks forms failed and is started again: %r", error)
                    self._requests = None
                else:
                    return
        raise CapacityError("the process that checks forms can't be started", "try again later.")

    def _start(self) -> socket.socket:
        """Start the process, and wait until it has read the vocabulary."""
        requests, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "speculant.structured.probe", str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env={**os.environ, **_QUIET},
                process_group=0,  # an interrupt is for the server; a new session would have its own share of time
            )
        weakref.finalize(requests, _end, process)
        requests.settimeout(START_S)
        send(requests, self._vocabulary)
        if requests.recv(1) != b"+":
            raise EOFError("it ended while it read the vocabulary")
        return requests


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


if __name__ == "__main__":
    with suppress(EOFError):
        serve(socket.socket(fileno=int(sys.argv[1])))
