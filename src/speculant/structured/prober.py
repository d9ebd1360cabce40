"""Probes forms in another process before this one compiles them; see `speculant.structured.probe`."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Collection

from speculant.errors import CapacityError
from speculant.structured.probe import Probed, ProbeLimits, send
from speculant.structured.spec import GrammarSource

logger = logging.getLogger(__name__)
START_S = 60.0  # seconds in which the process must have read the vocabulary
_PATIENCE = 30  # a probe may wait this many times as long for a processor as it may use one
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}  # a process with threads should not fork


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
