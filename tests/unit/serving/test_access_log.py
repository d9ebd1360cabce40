"""Records of requests and the lines that the access log makes of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant import SamplingParams, StreamPiece
from speculant.serving.access_log import FORMS, RECORD, AccessLog, RequestRecord, RequestRecords, note_end
from speculant.serving.http.clients import API_KEY, USER, key_digest
from speculant.serving.http.limits import ApiKeys, Heads, RequestIds

FIELDS = ["time", "client", "method", "path", "status", "bytes", "seconds", "first_token_seconds", "prompt_tokens",
          "generated_tokens", "accepted_tokens", "end", "request_id"]  # fmt: skip
KEY = "a-secret-key"


async def answering(scope: Scope, _: Receive, send: Send) -> None:
    """Answer with five bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"12", "more_body": True})
    await send({"type": "http.response.body", "body": b"345", "more_body": False})


async def leaving(scope: Scope, _: Receive, send: Send) -> None:
    """End in the middle of a response, as a stream does whose client is gone."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"12", "more_body": True})


async def dropping(scope: Scope, receive: Receive, send: Send) -> None:
    await leaving(scope, receive, send)
    note_end(scope, "unread")


async def refusing(_: Scope, __: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 429, "headers": []})
    await send({"type": "http.response.body", "body": b"full"})


async def generating(scope: Scope, receive: Receive, send: Send) -> None:
    record: RequestRecord = scope[RECORD]
    record.params, record.prompt_tokens = SamplingParams(), 3
    record.count(StreamPiece(0, 5, "a"), record.started + 0.25)
    record.count(StreamPiece(0, 6, "b", drafted=True), record.started + 0.5)
    record.count(StreamPiece(0, None, "", finish_reason="error"), record.started + 0.75)
    await answering(scope, receive, send)


async def failing(_: Scope, __: Receive, send: Send) -> None:
    raise LookupError("a bug")


async def ended(_: Scope, __: Receive, send: Send) -> None:
    raise asyncio.CancelledError


def scope_of(**given: Any) -> dict[str, Any]:
    base = {"type": "http", "method": "GET", "path": "/x", "raw_path": b"/x", "headers": [], "client": ("192.0.2.7", 9)}
    return {**base, **given}


def lines(app: ASGIApp, form: str, *scopes: dict[str, Any]) -> list[str]:
    """Return the log's lines for some requests."""
    written: list[str] = []
    whole = RequestIds(RequestRecords(Heads(app), [AccessLog(form, written.append)]))

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Message) -> None:
        pass

    async def main() -> None:
        for scope in scopes:
            await whole(scope, receive, send)

    try:
        asyncio.run(main())
    except (LookupError, asyncio.CancelledError):
        assert app in (failing, ended), "only these raise"
    return written


def fields(app: ASGIApp, **given: Any) -> dict[str, Any]:
    (line,) = lines(app, "json", scope_of(**given))
    return dict(json.loads(line))


@pytest.mark.parametrize(
    ("app", "status", "size", "end"),
    [(answering, 200, 5, "complete"), (leaving, 200, 2, "disconnected"), (dropping, 200, 2, "unread"),
     (refusing, 429, 4, "complete"), (failing, 500, 0, "error"), (ended, None, 0, "aborted")],
)  # fmt: skip
def test_a_line_says_how_a_response_ended(app: ASGIApp, status: int | None, size: int, end: str) -> None:
    line = fields(app)
    assert list(line) == FIELDS
    assert (line["status"], line["bytes"], line["end"]) == (status, size, end)
    assert 0 <= line["seconds"] < 60
    assert line["generated_tokens"] is None


def test_a_line_has_the_tokens_of_an_answer() -> None:
    line = fields(generating)
    assert (line["prompt_tokens"], line["generated_tokens"], line["accepted_tokens"]) == (3, 2, 1)
    assert line["first_token_seconds"] == 0.25


def test_a_line_has_the_request_s_id() -> None:
    assert fields(answering, headers=[(b"x-request-id", b"mine-7")])["request_id"] == "mine-7"
    assert re.fullmatch("[0-9a-f]{32}", fields(answering)["request_id"])


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_key_is_never_logged(method: str) -> None:
    scope = scope_of(method=method, headers=[(b"authorization", f"Bearer {KEY}".encode())])
    for form in FORMS:
        (line,) = lines(ApiKeys(answering, [KEY]), form, dict(scope))
        assert KEY not in line
        assert re.search(r"key:[0-9a-f]{8}\b", line), line
    assert fields(answering)["client"] == "192.0.2.7"


def test_a_user_is_logged_by_a_digest_beside_the_key() -> None:
    digest = key_digest("anna")
    for keys, client in (([], rf"user:{digest[:8]}"), ([KEY], rf"key:[0-9a-f]{{8}}/user:{digest[:8]}")):
        scope = scope_of(headers=[(b"authorization", f"Bearer {KEY}".encode())], **{USER: digest})
        (line,) = lines(ApiKeys(answering, keys), "text", scope)
        assert re.search(rf" client={client} ", line), line


def test_a_query_is_not_logged() -> None:
    (line,) = lines(answering, "text", scope_of(query_string=b"api_key=secret"))
    assert "secret" not in line


HOSTILE: Sequence[dict[str, Any]] = (
    {"raw_path": b"/x\n2026-01-01 client=admin status=200"},
    {"raw_path": b"/\x1b[31m\x00\r\xff"},
    {"raw_path": b'/" end=complete request_id="x'},
    {"raw_path": b"/" + b"y" * 30_000},
    {"method": "G" * 30_000},
    {"method": "GET status=200"},
    {"headers": [(b"x-request-id", b"x\nend=complete")]},
    {"headers": [(b"x-request-id", b"x" * 129)]},
    {"headers": [(b"x-request-id", b'a="b"\\=c')]},
    {"client": ("fe80::1%eth0\n", 1)},
    {"client": None},
    {"raw_path": None},
)


@pytest.mark.parametrize("given", HOSTILE, ids=lambda given: repr(given)[:40])
def test_nobody_forges_a_line(given: dict[str, Any]) -> None:
    (text,) = lines(answering, "text", scope_of(**given))
    assert [each.partition("=")[0] for each in text.split(" ")] == FIELDS
    assert re.fullmatch(r"[\x21-\x7e]+( [\x21-\x7e]+){12}", text)
    (line,) = lines(answering, "json", scope_of(**given))
    assert line.isascii()
    assert line.isprintable()
    assert list(json.loads(line)) == FIELDS
    assert max(len(text), len(line)) < 1000


def test_nothing_is_recorded_without_a_reader() -> None:
    scope = scope_of()
    asyncio.run(answering(scope, None, _ignore))  # type: ignore[arg-type]
    note_end(scope, "disconnected")
    assert RECORD not in scope
    assert API_KEY not in scope


async def _ignore(_: Message) -> None:
    pass
