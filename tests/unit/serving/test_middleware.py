"""Bounds and keys, with an application that returns what it receives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from speculant.serving import API_KEY, ApiKeys, RequestLimits, RequestRecords, ServerOptions


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    told = {"size": len(message["body"]), "key": scope.get(API_KEY)}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


def ask(app: ASGIApp, **request: Any) -> Any:
    async def main() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request("POST", **{"url": "/x", **request})

    return asyncio.run(main())


def limited(**options: Any) -> RequestLimits:
    return RequestLimits(echo, ServerOptions(max_body_bytes=100, max_header_bytes=500, **options))


async def parts(count: int, size: int, pause: float = 0.0) -> AsyncIterator[bytes]:
    for _ in range(count):
        await asyncio.sleep(pause)
        yield b"x" * size


@pytest.mark.parametrize(("size", "status"), [(0, 200), (100, 200), (101, 413), (10_000, 413)])
def test_bodies_are_bounded(size: int, status: int) -> None:
    assert ask(limited(), content=b"x" * size).status_code == status
    assert ask(limited(), content=parts(-(-size // 10), 10)).status_code == status
    if status == 200:
        assert ask(limited(), content=b"x" * size).json()["size"] == size


def test_a_refused_body_closes_the_connection() -> None:
    response = ask(limited(), content=b"x" * 101)
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_server_may_leave_out_the_raw_path() -> None:
    """ASGI does not require it."""

    async def bare(scope: Scope, receive: Receive, send: Send) -> None:
        await limited()({name: value for name, value in scope.items() if name != "raw_path"}, receive, send)

    assert ask(bare, content=b"x").json()["size"] == 1


def test_a_slow_body_is_refused() -> None:
    assert ask(limited(body_timeout=0.05), content=parts(5, 1, 0.05)).status_code == 408
    assert ask(limited(body_timeout=None), content=parts(5, 1, 0.01)).json()["size"] == 5


@pytest.mark.parametrize(
    "request_", [{"headers": {"a": "x" * 500}}, {"url": "/" + "x" * 500}, {"params": {"a": "x" * 500}}]
)
def test_headers_and_addresses_are_bounded(request_: dict[str, Any]) -> None:
    assert ask(limited(), **request_).status_code == 431


@pytest.mark.parametrize("given", [None, "Bearer", "Bearer other", "Basic one", "Bearer one2", "Bearer \xe9"])
def test_a_wrong_key_is_refused(given: str | None) -> None:
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    response = ask(ApiKeys(echo, ["one", "two"]), headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", ["one", "two"])
@pytest.mark.parametrize("other", [{}, {"authorization": "Bearer none"}, {"x-api-key": "none"}], ids=str)
@pytest.mark.parametrize("own", [{"authorization": "Bearer {}"}, {"x-api-key": "{}"}], ids=str)
def test_a_key_is_passed_on(key: str, own: dict[str, str], other: dict[str, str]) -> None:
    """Anthropic's clients may send one key in each header."""
    headers = {**other, **{name: value.format(key) for name, value in own.items()}}
    response = ask(ApiKeys(echo, ["one", "two"]), headers=headers)
    assert response.json()["key"] == key


@pytest.mark.parametrize("headers", [[("x-api-key", "one")] * 2, [("x-api-key", "")], [("x-api-key", "Bearer one")]])
def test_other_keys_are_refused_in_anthropic_s_form(headers: list[tuple[str, str]]) -> None:
    response = ask(RequestRecords(ApiKeys(echo, ["one", "two"])), url="/v1/messages", headers=headers)
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (401, "error", "authentication_error")
    assert told["request_id"] == response.headers["request-id"]


def test_health_needs_no_key() -> None:
    assert ask(ApiKeys(echo, ["one"], ["/health"]), url="/health").status_code == 200
    assert ask(ApiKeys(echo, []), url="/x").json()["key"] is None


@pytest.mark.parametrize(("given", "kept"), [("abc", True), ("a b", False), ("x" * 129, False), ("", False)])
def test_valid_request_ids_are_kept(given: str, kept: bool) -> None:
    answered = ask(RequestRecords(echo), headers={"x-request-id": given}).headers["x-request-id"]
    assert (answered == given) is kept
    assert answered


@pytest.mark.parametrize(("coding", "status"), [("gzip", 415), ("br", 415), ("identity", 200)])
def test_a_compressed_body_is_refused(coding: str, status: int) -> None:
    response = ask(limited(), content=b"x", headers={"content-encoding": coding})
    assert response.status_code == status
    if status == 415:
        assert coding in response.json()["error"]["message"]
