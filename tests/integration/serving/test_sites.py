"""Which requests of web pages are answered: one table over routes, names of the server, sites, types and keys."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from speculant import AsyncEngine
from speculant.errors import ConfigError
from speculant.serving import BODIES, PAGE, InsideRequest, ServerOptions, make_app, whole_response
from tests.models import Checkpoints, checkpoints
from tests.raw_clients import exchange
from tests.servers import LiveServer, serve

__all__ = ["checkpoints", "serve"]

PROBES = {"/health", "/ping"}
HOSTS = {  # whether a server accepts the name: bound to this machine alone, and bound to all addresses
    **dict.fromkeys(("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7:80"), (True, True)),
    **dict.fromkeys((socket.gethostname(), "named.example:8000", "localhost.", ""), (True, True)),
    "speculant:8000": (False, True),
    "evil.example": (False, False),
    **dict.fromkeys(("evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"), (False, False)),
    **dict.fromkeys(("a:b:c", "[::1", "evil.example/localhost", "localhost@evil.example"), (False, False)),
}  # fmt: skip
NO_SITE, OWN = None, "http://localhost:8000"
SITES = {  # whether a page of this site may use a server that it calls localhost:8000
    NO_SITE: True, OWN: True, "https://friend.example": True, "https://evil.example": False, "null": False, "": False,
    "http://localhost:3000": False, "https://friend.example.evil.example": False, "http://localhost": False,
    "https://localhost:8000": True,  # behind a proxy with TLS
}  # fmt: skip
KINDS = {
    "application/json": True, "Application/JSON; charset=utf-8": True, "application/vnd.api+json": True, None: False,
    "text/plain": False, "application/x-www-form-urlencoded": False, "multipart/form-data; boundary=a": False,
    "text/plain; application/json": False, "application/jsonp": False, "text/json": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(checkpoints: Checkpoints) -> Iterator[AsyncEngine]:
    """Return an engine for all servers of this module."""
    made = AsyncEngine(checkpoints.target)
    yield made
    asyncio.run(made.shutdown(drain=False))


def server_of(engine: AsyncEngine, **options: Any) -> Any:
    """Return an application, all of whose routes are ready."""
    app = make_app(engine, ServerOptions(**options))
    asyncio.run(app.state.server.load())
    return app


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Return the method and the path of each route."""
    found = [(method, each.path) for each in app.routes if isinstance(each, Route) for method in each.methods or ()]
    assert {path for _, path in found} >= {*PAGE, *BODIES, *PROBES}
    return found


def status_of(
    app: Any, method: str, path: str, headers: dict[str, str | None], body: bytes = b"{}"
) -> tuple[int, bytes]:
    given = tuple((name.encode(), value.encode()) for name, value in headers.items() if value is not None)
    url = path.replace("{response_id}", "resp_1").replace("{model:path}", "other")
    head, content = asyncio.run(whole_response(app, InsideRequest(method, url, body, given)))
    return head.status, content


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_pages_of_other_sites_do_not_use_a_server_without_keys(engine: AsyncEngine, host: str) -> None:
    """Whatever the route: each pair of a name and a site has the same fate on all routes but those of probes."""
    app = server_of(engine, host=host, allowed_hosts=("named.example",), allowed_origins=("https://friend.example",))
    names = [(name, NO_SITE) for name in HOSTS] + [("localhost:8000", site) for site in SITES]
    for (method, path), (name, site) in itertools.product(routes_of(app), names):
        accepted = HOSTS.get(name, (True, True))[host == "0.0.0.0"] and SITES[site]
        headers = {"host": name or None, "origin": site, "content-type": "application/json"}
        status, content = status_of(app, method, path, headers)
        if accepted or path in PROBES:
            assert status not in (401, 403, 415), (method, path, headers, content)
        else:
            assert status == 403, (method, path, headers)
            error = json.loads(content)["error"]
            assert (error.get("code") or error["details"]["error_code"]) == "forbidden_site"
            assert "--allowed-" in error["message"]


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "keys"])
def test_bodies_are_json_by_their_type(engine: AsyncEngine, keys: tuple[str, ...]) -> None:
    """A page may send other types to any server, without its leave."""
    app = server_of(engine, api_keys=keys)
    for path, (kind, is_json) in itertools.product(BODIES, KINDS.items()):
        headers = {"host": "localhost", "content-type": kind, "authorization": "Bearer secret" if keys else None}
        status, content = status_of(app, "POST", path, headers)
        assert status == (400 if is_json else 415), (path, kind, content)
        assert is_json or b"Content-Type: application/json" in content


def test_a_key_is_enough(engine: AsyncEngine) -> None:
    """Pages do not know it. Without it, no route is answered but those of probes and the page's files."""
    app = server_of(engine, api_keys=("secret",))
    for (method, path), name, site, key in itertools.product(
        routes_of(app), ("localhost", "evil.example"), (NO_SITE, "https://evil.example"), (None, "Bearer secret")
    ):
        headers = {"host": name, "origin": site, "content-type": "application/json", "authorization": key}
        status, content = status_of(app, method, path, headers)
        assert (status == 401) == (key is None and path not in PROBES | {*PAGE}), (method, path, headers, content)
        assert status not in (403, 415), (method, path, headers, content)


def test_any_name_may_be_allowed(engine: AsyncEngine) -> None:
    app = server_of(engine, allowed_hosts=("*",))
    assert status_of(app, "GET", "/v1/models", {"host": "evil.example"})[0] == 200
    assert status_of(app, "GET", "/v1/models", {"host": "evil.example", "origin": "https://evil.test"})[0] == 403
    for wrong in ("http://named.example", "named.example:80", ""):
        with pytest.raises(ConfigError, match="without scheme and port"):
            ServerOptions(allowed_hosts=(wrong,))


def test_a_simple_request_of_a_page_makes_no_token(serve: Any, checkpoints: Checkpoints) -> None:
    """As a browser sends it, over a connection."""
    engine = AsyncEngine(checkpoints.target)
    server: LiveServer = serve(engine).ready()
    body = b'{"prompt": "a", "max_tokens": 4}'
    for extra in ("Origin: http://evil.example\r\n", "Host: evil.example\r\n", "Content-Type: text/plain\r\n"):
        kind = "" if "Type" in extra else "Content-Type: application/json\r\n"
        name = "" if "Host" in extra else "Host: localhost\r\n"
        head = f"POST /v1/completions HTTP/1.1\r\n{name}{kind}{extra}Connection: close\r\nContent-Length: {len(body)}"
        reply = asyncio.run(exchange(server.url, f"{head}\r\n\r\n".encode() + body))
        assert reply.status == (415 if "Type" in extra else 403)
    assert engine.metrics.steps == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400 + ".5"])
@pytest.mark.parametrize("path", BODIES)
def test_numbers_that_json_can_t_express_are_refused(engine: AsyncEngine, path: str, number: str) -> None:
    """Wherever they stand. Some of them would fail only when the answer or a form is written, which was a 500."""
    app, headers = server_of(engine), {"host": "localhost", "content-type": "application/json"}
    tool = '{"type": "function", "function": {"name": "a", "parameters": {"minimum": %s}}}'
    required = {"/v1/completions": '"prompt": "a"', "/v1/responses": '"input": "a"', "/detokenize": '"tokens": [1]'}
    required["/infill"] = '"input_prefix": "a", "input_suffix": "b"'
    start = required.get(path, '"messages": [{"role": "user", "content": "a"}]')
    for field in (
        f'"tools": [{tool}]', '"chat_template_kwargs": {"a": [%s]}', '"structured_outputs": {"json": {"maximum": %s}}',
        '"temperature": %s', '"unknown": {"a": {"b": %s}}', '"logit_bias": {"1": %s}',
        '"documents": [{"a": %s}]', '"speculation": {"num_speculative_tokens": %s}',
    ):  # fmt: skip
        status, content = status_of(app, "POST", path, headers, f"{{{start}, {field % number}}}".encode())
        assert (status, json.loads(content)["error"]["code"]) == (400, "invalid_json"), (path, field, content)
