"""Validates responses by OpenAI's own OpenAPI document, which SPECULANT_OPENAI_SCHEMA names as a JSON file.

`Recorder` keeps whatever a client gets, so that a test validates every response and every chunk. The document is not
part of this package. Without it the tests check everything else.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

Check = Callable[[str, Any], None]
_VARIABLE = "SPECULANT_OPENAI_SCHEMA"
WHOLE = {
    "/v1/chat/completions": "CreateChatCompletionResponse",
    "/v1/completions": "CreateCompletionResponse",
    "/v1/responses": "Response",
    "/v1/models": "ListModelsResponse",
}
CHUNKS = {
    "/v1/chat/completions": "CreateChatCompletionStreamResponse",
    "/v1/completions": "CreateCompletionChunk",
    "/v1/responses": "ResponseStreamEvent",
}


class Recorder(httpx.BaseTransport):
    """Sends requests and keeps the responses as bytes."""

    def __init__(self) -> None:
        self._transport = httpx.HTTPTransport(verify=False)
        self._kept: list[tuple[httpx.Request, httpx.Response, bytearray]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.BaseTransport`."""
        response, kept = self._transport.handle_request(request), bytearray()
        self._kept.append((request, response, kept))
        stream = _Tee(response, kept)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    def close(self) -> None:
        """See `httpx.BaseTransport`."""
        self._transport.close()

    def check(self, conforms: Check) -> int:
        """Check every document that came, chunks and errors too; return how many there were."""
        documents = [each for kept in self._kept for each in _documents(*kept)]
        for name, value in documents:
            conforms(name, value)
        return len(documents)


class _Tee(httpx.SyncByteStream):
    def __init__(self, response: httpx.Response, kept: bytearray) -> None:
        self._response, self._kept = response, kept

    def __iter__(self) -> Iterator[bytes]:
        for data in self._response.iter_raw():
            self._kept += data
            yield data

    def close(self) -> None:
        self._response.close()


def _documents(request: httpx.Request, response: httpx.Response, data: bytearray) -> Iterator[tuple[str, Any]]:
    """Yield the documents of a response, each with the name of its schema."""
    path = request.url.path
    if response.status_code >= 400:
        yield "ErrorResponse", json.loads(data)
    elif response.headers["content-type"].startswith("text/event-stream"):
        for line in data.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield CHUNKS[path], json.loads(line[6:])
    elif request.method != "DELETE":  # its answer has no schema
        yield _whole(path), json.loads(data)


def _whole(path: str) -> str:
    """Return the name of the schema of a response in one piece."""
    if path.startswith("/v1/responses/"):
        return "ResponseItemList" if path.endswith("/input_items") else "Response"
    return WHOLE.get(path, "Model")


@pytest.fixture(scope="session")
def conforms() -> Check:
    """Return a check that a value has a schema of that name; without the document it checks nothing."""
    path = schema_path()
    return _checker(path) if path is not None else lambda name, value: None


def schema_path() -> str | None:
    """Return where the document is; None = it is not there."""
    return os.environ.get(_VARIABLE)


@cache
def _checker(path: str) -> Check:
    validation = pytest.importorskip("jsonschema")
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    components = _with_nulls(document["components"])
    schemas = components["schemas"]
    schemas["CreateCompletionChunk"] = _as_chunk(schemas["CreateCompletionResponse"])

    @cache
    def validator(name: str) -> Any:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        return validation.Draft202012Validator(schema)

    def check(name: str, value: Any) -> None:
        errors = sorted(validator(name).iter_errors(value), key=lambda error: list(map(str, error.path)))
        assert not errors, "\n".join(f"{list(error.path)}: {error.message[:300]}" for error in errors[:3])

    return check


def _as_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a completion's chunks. The document says that it is the whole completion's.

    OpenAI's chunks have no reason before the last one, and no usage, which are null then.
    """
    chunk = copy.deepcopy(completion)
    choice = chunk["properties"]["choices"]["items"]["properties"]
    for place, name in ((choice, "finish_reason"), (chunk["properties"], "usage")):
        place[name] = {"anyOf": [place[name], {"type": "null"}]}
    return chunk


def _with_nulls(value: Any) -> Any:
    """Return a schema in which OpenAPI's older `nullable` is a type."""
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    rewritten = {key: _with_nulls(each) for key, each in value.items() if key != "nullable"}
    return {"anyOf": [rewritten, {"type": "null"}]} if value.get("nullable") is True else rewritten
