"""A server in a process of its own: a benchmark in the same interpreter would slow it down."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from speculant.cli import LISTENING
from speculant.errors import ServerError

_COMMAND = (sys.executable, "-m", "speculant.cli.main", "serve", "--host", "127.0.0.1", "--port", "0")
_POLL = 0.05  # seconds between looks at a starting server
_END = 40.0  # seconds before it is killed
_MOST_QUOTED = 2000  # characters of its output in an error


@contextmanager
def own_server(settings: Mapping[str, str]) -> Iterator[str]:
    """Run `speculant serve` on a free port of this machine, and yield its address once it serves requests.

    settings: environment variables; every flag of the engine has one. The process ends with the block, after SIGTERM
    too. Raises ServerError, with the server's output, if it ends before.
    """
    with tempfile.TemporaryDirectory() as folder, _sigterm_exits():
        log = Path(folder) / "log"
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **settings},
            )
        try:
            yield _address(process, log)
        finally:
            _end(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server prints its address and answers there."""
    while process.poll() is None:
        found = re.search(rf"^{LISTENING} (\S+)", _text(log), re.MULTILINE)
        if found and _is_healthy(found[1]):
            return found[1]
        time.sleep(_POLL)
    text = _text(log)
    if explained := re.search(r"^error: (.*)\n  fix: (.*)", text, re.MULTILINE):
        raise ServerError(f"the server did not start: {explained[1]}", explained[2])
    raise ServerError(f"the server ended at once: {text[-_MOST_QUOTED:].strip()}", "start it with `speculant serve`.")


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")


def _is_healthy(url: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_END)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Raise SystemExit at SIGTERM, which would end this process at once and leave the server running."""
    if threading.current_thread() is not threading.main_thread():  # there are no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
