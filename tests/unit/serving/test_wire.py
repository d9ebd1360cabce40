"""Errors in OpenAI's shape, JSON in parts, and event streams that end when their client leaves or reads nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from speculant.errors import (
    CapacityError,
    ConfigError,
    ContextFullError,
    DistributionError,
    EngineClosedError,
    EngineDeadError,
    ModelError,
    RequestError,
    SpeculantError,
)
from speculant.serving import (
    ABORT,
    ApiError,
    ChatBody,
    ClientGoneError,
    Deferred,
    EventStream,
    api_error,
    encode,
    encode_in_parts,
    refusal,
    scrub,
    while_connected,
)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ConfigError("a", "b."), 400, "invalid_request_error"),
        (RequestError("a", "b."), 400, "invalid_request_error"),
        (CapacityError("a", "b."), 429, "rate_limit_error"),
        (EngineClosedError("a", "b."), 503, "server_error"),
        (EngineDeadError("a", "b."), 503, "server_error"),
        (ModelError("no template", "b."), 400, "invalid_request_error"),
        (DistributionError("NaN", "b."), 500, "server_error"),
        (SpeculantError("a", "b."), 500, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
        (ApiError(404, "x"), 404, "not_found_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_a_status_and_a_type(error: Exception, status: int, kind: str) -> None:
    told = api_error(error)
    assert (told.status, told.kind) == (status, kind)
    assert set(told.body()["error"]) == {"message", "type", "param", "code"}


def test_foreign_errors_have_no_details() -> None:
    assert "secret" not in api_error(ZeroDivisionError("secret")).message
    assert "secret" not in api_error(EngineDeadError("died of secret", "x.")).message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/model/config.json can't be read", "[path] can't be read"),
        ("<Thing object at 0x7f3a00c01d20>", "<Thing object at [address]>"),
        (r"C:\models\x is missing", "[path] is missing"),
        ("see docs/serving.md", "see docs/serving.md"),
        ("tokens/s, and 1/2", "tokens/s, and 1/2"),
        ("use /v1", "use /v1"),
    ],
)
def test_messages_have_no_paths_and_addresses(text: str, shown: str) -> None:
    assert scrub(text) == shown


def test_long_messages_are_shortened_and_keep_their_fix() -> None:
    told = api_error(RequestError("x" * 10_000, "shorten it."))
    assert told.message.endswith("Fix: shorten it.")
    assert len(told.message) < 1000
    assert len(scrub("y" * 10_000)) == 1000


@pytest.mark.parametrize(
    "advice",
    [
        "use /v1/chat/completions.",
        "send it to /v1/completions or /v1/responses.",
        "the model '/models/mine/x' is unknown.",
    ],
)
def test_advice_and_words_of_the_client_are_kept(advice: str) -> None:
    assert refusal(advice).message == advice


def test_a_path_of_the_server_is_hidden() -> None:
    assert "/home" not in api_error(RequestError("can't read /home/me/model/x.json", "see /home/me/log.")).message


@pytest.mark.parametrize(
    ("body", "error", "param", "begins"),
    [
        ({"n": 0}, ConfigError("n=0 is not a number", "set n."), "n", "n=0 is not"),
        ({"max_completion_tokens": 0}, ConfigError("max_tokens=0 is not a number", "set max_tokens."),
         "max_completion_tokens", "max_completion_tokens=0 is not a number. Fix: set max_completion_tokens."),
        ({"max_tokens": 0}, ConfigError("max_tokens=0 is wrong", "set max_tokens."), "max_tokens", "max_tokens=0"),
        ({"logprobs": True, "top_logprobs": 200}, ConfigError("logprobs=200 is too many", "set logprobs."),
         "top_logprobs", "top_logprobs=200"),
        ({"stop": ["x"]}, ConfigError("stop must be short", "x."), "stop", "stop must"),
        ({}, ContextFullError("the prompt is too long: 9 tokens > 7 maximum", "x."), "messages", "The prompt is too"),
        ({"response_format": {"type": "text"}}, RequestError("the json of structured_outputs can't be used", "x."),
         "response_format", "The json of response_format"),
        ({"speculation": {"method": "x"}}, ConfigError("method 'x' is unknown", "x."), "speculation", "method 'x'"),
        ({"logit_bias": {"5": 1}}, RequestError("logit_bias has 5", "x."), "logit_bias", "logit_bias has"),
        ({}, RequestError("this checkpoint has no chat template", "x."), None, "This checkpoint"),
        ({"seed": 1, "user": "the"}, RequestError("the seed of all evil", "x."), None, "The seed of"),
    ],
)  # fmt: skip
def test_errors_use_the_field_name_that_was_sent(
    body: dict[str, Any], error: SpeculantError, param: str | None, begins: str
) -> None:
    sent = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
    told = api_error(error, sent.sent_as)
    assert told.param == param
    assert told.code == ("context_length_exceeded" if isinstance(error, ContextFullError) else None)
    assert told.message.startswith(begins)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    LEAVES | st.lists(st.integers(), min_size=30, max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_parts_make_the_same_document(value: Any) -> None:
    assert json.loads(asyncio.run(encode_in_parts(value))) == json.loads(encode(value))


@pytest.mark.parametrize("value", [{"a": {1: 2}, "b": []}, [{}, [], "\ud800", "ä"], {"t": (1, 2)}], ids=str)
def test_parts_have_the_same_bytes(value: Any) -> None:
    assert asyncio.run(encode_in_parts(value)).decode() == encode(value).decode().replace("\\u00e4", "ä")


def test_deferred_part_is_made_when_it_is_written() -> None:
    made = list[int]()

    def make(number: int) -> dict[str, int]:
        made.append(number)
        return {"number": number}

    value = {"rows": [None, *(Deferred(lambda number=number: make(number)) for number in range(50))]}  # type: ignore[misc]
    assert not made
    found = json.loads(asyncio.run(encode_in_parts(value)))
    assert found == json.loads(encode(value)) == {"rows": [None, *({"number": number} for number in range(50))]}


def test_a_value_outside_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="object can't be written"):
        encode({"a": object()})


def test_other_tasks_run_while_a_long_document_is_written() -> None:
    """It pauses wherever it may; between two pauses it writes one item of the list."""
    order: list[str] = []

    async def beat() -> None:
        while True:
            order.append("other")
            await asyncio.sleep(0)

    async def test() -> None:
        beating = asyncio.create_task(beat())
        items = [Deferred(lambda: order.append("item")) for _ in range(100)]
        await encode_in_parts({"rows": items}, longest_turn=0.0, pause=0.0)
        beating.cancel()

    asyncio.run(test())
    longest = max(map(len, "".join(name[0] for name in order).split("o")))
    assert order.count("item") == 100
    assert longest <= 1


class Client:
    """The client of a connection: it disconnects after `goes` seconds, and stops reading after `reads` events."""

    def __init__(self, goes: float = 100, reads: int = 100) -> None:
        self._goes, self._reads = goes, reads
        self.had: list[bytes] = []
        self.aborted = False

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(self._goes)
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and message["more_body"]:
            if len(self.had) == self._reads:
                await asyncio.sleep(100)
            self.had.append(message["body"])

    def abort(self) -> None:
        self.aborted = True


class Source:
    """Makes events, and records whether it was closed."""

    def __init__(self, count: int) -> None:
        self.count, self.closed = count, False

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0.001)
                yield b"%d" % number
        finally:
            self.closed = True


def play(source: Source, client: Client, timeout: float | None = 0.05) -> None:
    async def main() -> None:
        async with asyncio.timeout(5):
            scope = {"type": "http", "extensions": {ABORT: client.abort}}
            await EventStream(source.events(), timeout)(scope, client.receive, client.send)

    asyncio.run(main())
    assert source.closed


def test_all_events_reach_the_client() -> None:
    client = Client()
    play(Source(20), client)
    assert client.had == [b"%d" % number for number in range(20)]
    assert not client.aborted


def test_a_client_that_stops_reading_is_dropped() -> None:
    client = Client(reads=3)
    play(Source(10_000), client)
    assert client.aborted
    assert len(client.had) == 3


def test_a_client_that_disconnects_ends_the_stream() -> None:
    client = Client(goes=0.05)
    play(Source(10_000), client, None)
    assert 0 < len(client.had) < 1000
    assert not client.aborted


def test_work_is_cancelled_when_its_client_disconnects() -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(5)
        finally:
            ended.append("work")
        return "done"

    async def main() -> None:
        with pytest.raises(ClientGoneError):
            await while_connected(Client(goes=0.01).receive, work())

    asyncio.run(main())
    assert ended == ["work"]


def test_work_returns_or_raises_while_connected() -> None:
    async def fails() -> None:
        raise LookupError

    async def main() -> None:
        assert await while_connected(Client().receive, asyncio.sleep(0.001, "done")) == "done"
        with pytest.raises(LookupError):
            await while_connected(Client().receive, fails())

    asyncio.run(main())
