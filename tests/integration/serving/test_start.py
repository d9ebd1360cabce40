"""A server that can't listen reports it before it downloads or loads anything."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from speculant.cli import serve as command
from speculant.cli.main import main
from speculant.config import EngineConfig
from speculant.errors import ConfigError
from speculant.serving.app import make_app
from speculant.serving.http.server import Server
from speculant.serving.options import ServerOptions
from tests.servers import LiveServer


@pytest.fixture
def busy() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def never(*_: Any) -> Any:
    raise AssertionError("something was loaded")


def test_a_busy_port_is_refused_before_the_model_is_loaded(busy: int) -> None:
    options = ServerOptions(port=busy)
    with pytest.raises(ConfigError, match=rf"can't listen at 127.0.0.1:{busy}: Address already in use\n.*--port"):
        Server(make_app(never, options), options, never)


def test_a_busy_port_is_refused_before_the_model_is_downloaded(busy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "fetch", never)
    with pytest.raises(ConfigError, match="can't listen"):
        command.run({"model": "org/far"}, ServerOptions(port=busy), EngineConfig(model="org/far"))


def test_an_address_of_another_machine_is_refused() -> None:
    options = ServerOptions(host="203.0.113.1")
    with pytest.raises(ConfigError, match=r"can't listen at 203.0.113.1:8000: .*\n.*an address of this machine"):
        Server(make_app(never, options), options, never)


@pytest.mark.parametrize("host", ["nohost.invalid", "a" * 70, "1.2.3.4.5"])
def test_a_host_that_does_not_exist_is_refused(host: str) -> None:
    options = ServerOptions(host=host)
    with pytest.raises(ConfigError, match=r"there is no host of this name\n.*--host") as caught:
        Server(make_app(never, options), options, never)
    assert "--port" not in str(caught.value)


def test_answers_are_sent_at_once(demo: LiveServer) -> None:
    """Without TCP_NODELAY the second part of a response waits for 40 ms."""
    assert demo.server._socket.proto == socket.IPPROTO_TCP


def test_the_command_says_it_without_a_traceback(
    busy: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["speculant", "serve", "demo", "--port", str(busy)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    said = capsys.readouterr().err
    assert f"can't listen at 127.0.0.1:{busy}" in said
    assert "Traceback" not in said
    assert "loading" not in said
