"""Large texts of one client delay neither its own small requests nor others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from speculant import AsyncEngine
from speculant.serving import LARGE
from speculant.text import Tokenizer
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import encoded, opened
from tests.servers import LiveServer, serve
from tests.surfaces import SURFACES, Surface, Wanted

__all__ = ["checkpoints", "serve"]
FULL = "context_length_exceeded"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools or '' }}{{ documents or '' }}"


class Blocked:
    """A server whose thread for large texts is busy until `go`."""

    def __init__(self, server: LiveServer) -> None:
        self.server, self._go, begun = server, threading.Event(), threading.Event()
        server.state.texts.submit("somebody", LARGE + 1, lambda: (begun.set(), self._go.wait(30)))
        assert begun.wait(30)

    def go(self) -> None:
        self._go.set()


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[LiveServer]:
    engine = AsyncEngine(checkpoints.target, chat_template=TEMPLATE)
    live = LiveServer(engine, max_large_texts=1, text_timeout=30.0).ready()
    yield live
    live.stop()


def sent(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return the connection, which the client can close."""
    connection = opened(server.url)
    connection.sendall(encoded(path, body))
    return connection


MESSAGE = {"role": "user", "content": "a"}
LARGE_BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/v1/completions", {"prompt": "ab " * 30_000, "truncate_prompt_tokens": 4}),
    "unknown fields": ("/v1/completions", {"prompt": "a", "x": ["ab"] * 30_000}),
    "tokenize": ("/tokenize", {"prompt": "ab " * 30_000, "return_token_strs": True}),
    "detokenize": ("/detokenize", {"tokens": [65] * 30_000}),
    "messages": (
        "/v1/chat/completions",
        {"messages": [MESSAGE] * 2000, "x": "ab" * 30_000, "truncate_prompt_tokens": 4},
    ),
    "tools": ("/tokenize", {"messages": [MESSAGE], "tools": [{"a": "b" * 30}] * 2000}),
    "documents": ("/tokenize", {"messages": [MESSAGE], "documents": [{"a": "b" * 30}] * 2000}),
    "input": ("/v1/responses", {"input": [MESSAGE], "instructions": "a", "x": "b" * 70_000}),
}


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_small_requests_do_not_wait_for_large_ones(server: LiveServer, name: str) -> None:
    path, body = LARGE_BODIES[name]
    blocked = Blocked(server)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.http.post, path, json={"max_tokens": 1, **body})
        server.until(lambda: "address:127.0.0.1" in server.state.texts._large._held)
        assert server.post("/v1/completions", prompt="a", max_tokens=1)["choices"]
        assert server.post("/tokenize", messages=[MESSAGE])["count"]
        refused = server.http.post(path, json={"max_tokens": 1, **body})
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert not waiting.done()
        blocked.go()
        assert waiting.result().status_code == 200, waiting.result().text
    assert server.http.post(path, json={"max_tokens": 1, **body}).status_code == 200


def test_a_client_that_leaves_gives_its_place_back(server: LiveServer) -> None:
    blocked = Blocked(server)
    path, body = LARGE_BODIES["text"]
    for _ in range(3):
        with sent(server, path, body):
            server.until(lambda: "address:127.0.0.1" in server.state.texts._large._held)
        server.until(lambda: "address:127.0.0.1" not in server.state.texts._large._held)
    blocked.go()
    assert server.post(path, **body)["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("name", ["text", "messages", "input"])
def test_who_leaves_after_its_body_was_read_is_noticed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its settings wait for the thread, too."""
    submit, pieces = server.state.texts.submit, list[Future[Any]]()

    def second_waits(*piece: Any) -> Future[Any]:
        pieces.append(Future() if pieces else submit(*piece))
        return pieces[-1]

    monkeypatch.setattr(server.state.texts, "submit", second_waits)
    path, body = LARGE_BODIES[name]
    with sent(server, path, body):
        server.until(lambda: len(pieces) == 2)
        assert not pieces[1].cancelled()
    server.until(pieces[1].cancelled, patience=5.0)


REFUSING = [each for each in SURFACES if each.path != "/infill"]  # which cuts texts


@pytest.mark.parametrize("surface", REFUSING, ids=lambda surface: surface.path)
def test_a_text_beyond_the_context_is_not_tokenised(
    serve: Callable[..., LiveServer], checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, surface: Surface
) -> None:
    engine = AsyncEngine(checkpoints.target, chat_template=TEMPLATE)
    server = serve(engine).ready()
    most, encoded = engine.tokenizer.characters_per_token, list[int]()
    assert most is not None
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    for extra in (0, 1):
        text = "a" * (most * engine.limits.max_model_len + extra)
        wanted = Wanted(messages=[{"role": "user", "content": text}], prompts=[text])
        response = server.http.post(surface.path, json=surface.write(wanted))
        assert response.status_code == 400
        error = response.json()["error"]
        assert error.get("code", FULL) == FULL, "by which OpenAI's clients know it"
        assert "prompt is too long" in error["message"], "by which Anthropic's do"
        assert f"maximum context length is {engine.limits.max_model_len} tokens" in error["message"]
    assert encoded == [most * engine.limits.max_model_len]
    cut = {"prompt": text, "truncate_prompt_tokens": 3, "max_tokens": 1}
    assert server.post("/v1/completions", **cut)["usage"]["prompt_tokens"] == 3
    assert server.post("/tokenize", prompt=text)["count"] == len(text)
