"""Servers that answer real connections: in a thread with an event loop of its own, or in a process."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from speculant import AsyncEngine
from speculant.errors import ModelError
from speculant.serving import Server, ServerOptions, ServerState, make_app

_PATIENCE = 30.0
FIM_MARKS = {"fim_pre_token": "Ā", "fim_suf_token": "ā", "fim_mid_token": "Ă"}  # the bytes 0, 1 and 2


Server.tick_s = 0.01  # so that servers notice ends and deadlines soon


class LiveServer:
    """An application behind a port of this machine. `url` is its address, `http` a client of it."""

    def __init__(self, engine: AsyncEngine | Callable[[], AsyncEngine], **options: Any) -> None:
        self._serve(make_app(engine, ServerOptions(port=0, **options)), options)

    def _serve(self, app: FastAPI, options: Mapping[str, Any]) -> None:
        self.app = app
        self.state: ServerState = app.state.server
        listening: Future[str] = Future()
        self.said_ready: list[str] = []
        ready = partial(self.said_ready.append, "ready")
        self.server = Server(self.app, ServerOptions(port=0, **options), listening.set_result, on_ready=ready)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self.url = listening.result(_PATIENCE)
        # nothing is encrypted, and a client that verifies reads all certificates of the system when it is made
        self.http = httpx.Client(base_url=self.url, timeout=_PATIENCE, trust_env=False, verify=False)

    def ready(self) -> LiveServer:
        """Wait until requests are served."""
        self.until(lambda: self.http.get("/health").status_code == 200)
        return self

    def post(self, path: str, **body: Any) -> Any:
        """Return the answer to a request that is served."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> Iterator[str]:
        """Yield the data of the events of a stream."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def chunks(self, path: str, **body: Any) -> list[Any]:
        """Return the chunks of a stream, which ends as it has to."""
        *events, last = self.events(path, **body)
        assert last == "[DONE]"
        return [json.loads(each) for each in events]

    def in_loop(self, call: Callable[[], Any]) -> None:
        """Call something in the server's event loop."""
        assert self.server._loop is not None
        self.server._loop.call_soon_threadsafe(call)

    def until(self, holds: Callable[[], bool], patience: float = _PATIENCE) -> None:
        """Wait for something that happens in the server."""
        deadline = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.005)

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(_PATIENCE)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """End the server, and its engine."""
        self.http.close()
        self.server.should_exit = True
        self.wait()

    def _run(self) -> None:
        asyncio.run(self.server.serve())


@pytest.fixture
def never_loads() -> Iterator[Callable[[], AsyncEngine]]:
    """Return a model that is not loaded: routes that need none are served."""
    over = threading.Event()

    def load() -> AsyncEngine:
        over.wait()
        raise ModelError("there is none", "name another.")

    yield load
    over.set()


@contextmanager
def in_background(calls: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Run calls in threads until the block ends and they do."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., LiveServer]]:
    """Start servers that end with the test."""
    started: list[LiveServer] = []

    def start(*arguments: Any, **options: Any) -> LiveServer:
        started.append(LiveServer(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


class ServerProcess:
    """`speculant serve` in a process of its own, which a test can signal and measure."""

    def __init__(self, model: str, *flags: str, files: int | None = None) -> None:
        """files: how many the process may open; None = as many as this one."""
        command = [sys.executable, "-m", "speculant.cli.main", "serve", model, "--port", "0", *flags]
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.messages = [self.process.stderr.readline()]
        assert self.messages[0].startswith("Listening at "), self.messages[0] + self.process.stderr.read()
        self.url = self.messages[0].split()[2].rstrip(";")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=_PATIENCE, trust_env=False, verify=False)

    def ready(self) -> ServerProcess:
        """Wait until requests are served."""
        deadline = time.monotonic() + 6 * _PATIENCE  # loading reads a lot, and other tests may do so too
        while self.http.get("/health").status_code != 200:
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.01)
        return self

    def until_loaded(self) -> None:
        """Wait until the model is loaded or the process has ended, in whatever state the server is."""
        deadline = time.monotonic() + 6 * _PATIENCE
        while self.process.poll() is None and not any(": ready; " in message for message in self.messages):
            assert time.monotonic() < deadline, self.messages
            time.sleep(0.01)

    @property
    def memory(self) -> int:
        """The resident memory of the process, in bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()

    def signal(self) -> None:
        """Ask the server to end."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = _PATIENCE) -> int:
        """Wait until the process has ended; return its exit status."""
        status = self.process.wait(seconds)
        self._reader.join(_PATIENCE)
        return status

    def stop(self) -> None:
        """End the process, whatever it does."""
        self.http.close()
        self.process.kill()
        self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self.messages += lines


@pytest.fixture
def serve_process() -> Iterator[Callable[..., ServerProcess]]:
    """Start servers in processes of their own that end with the test."""
    started: list[ServerProcess] = []

    def start(model: str, *flags: str, files: int | None = None) -> ServerProcess:
        started.append(ServerProcess(model, *flags, files=files))
        return started[-1]

    yield start
    for server in started:
        server.stop()
