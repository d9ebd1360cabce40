"""Requests on their way to replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from hypothesis import given, strategies as st
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from speculant.scale import MOST_CHARACTERS, TRIES, Fleet, RoutedRequest, routed
from speculant.serving import ApiError, InsideRequest, ResponseHead
from tests.ray_fakes import SILENT, Answer, FakeHandle, saying

JSON = ResponseHead(200, ((b"content-type", b"application/json"),))
STREAM = ResponseHead(200, ((b"content-type", b"text/event-stream; charset=utf-8"),))
LOST = RayActorError()
T = TypeVar("T")


def _request(path: str = "/v1/completions") -> RoutedRequest:
    return RoutedRequest("text", InsideRequest("POST", path))


async def _read(fleet: Fleet, path: str = "/v1/completions") -> list[Any]:
    async with aclosing(fleet.responses(_request(path))) as pieces:
        return [piece async for piece in pieces]


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 20))


async def _forever(_: RoutedRequest) -> AsyncIterator[Any]:
    yield "one"
    yield STREAM
    while True:
        yield b"data: x\n\n"
        await asyncio.sleep(0.001)


def _error_of(*answers: Answer) -> ApiError:
    async def ask() -> None:
        await _read(Fleet(FakeHandle(*answers)))

    with pytest.raises(ApiError) as caught:
        _run(ask())
    return caught.value


@pytest.mark.parametrize("before", [(), ("one",)])
def test_another_replica_answers_for_a_lost_one(before: tuple[str, ...]) -> None:
    async def ask() -> tuple[list[Any], FakeHandle]:
        handle = FakeHandle(saying(*before, LOST), saying("two", JSON, b"{}"))
        return await _read(Fleet(handle)), handle

    pieces, handle = _run(ask())
    assert pieces == [*before, "two", JSON, b"{}"]
    assert len(handle.asked) == 2


def test_replicas_are_tried_a_few_times() -> None:
    async def ask() -> int:
        handle = FakeHandle(saying(LOST))
        with pytest.raises(ApiError, match="lost") as caught:
            await _read(Fleet(handle))
        assert (caught.value.status, caught.value.code) == (503, "replica_lost")
        return len(handle.asked)

    assert _run(ask()) == TRIES


def test_a_stream_that_lost_its_replica_ends_with_an_error() -> None:
    async def ask() -> tuple[list[Any], FakeHandle]:
        handle = FakeHandle(saying("one", STREAM, b"data: 1\n\n", LOST), saying("two", STREAM))
        return await _read(Fleet(handle)), handle

    pieces, handle = _run(ask())
    assert pieces[:3] == ["one", STREAM, b"data: 1\n\n"]
    (last,) = pieces[3:]
    assert last.startswith(b"data: ")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert len(handle.asked) == 1, "a response that has begun was asked for again"


def test_error_events_of_responses_are_numbered() -> None:
    two = b"event: a\ndata: {}\n\nevent: b\ndata: {}\n\n"  # in one piece

    async def ask() -> bytes:
        handle = FakeHandle(saying("one", STREAM, two, b"event: c\ndata: {}\n\n", LOST))
        return bytes((await _read(Fleet(handle), "/v1/responses"))[-1])

    name, data = _run(ask()).split(b"\n")[:2]
    assert name == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert (told["type"], told["code"], told["sequence_number"]) == ("error", "replica_lost", 3)


def test_error_events_of_messages_have_anthropic_s_form() -> None:
    async def ask() -> bytes:
        handle = FakeHandle(saying("one", STREAM, b"event: a\ndata: {}\n\n", LOST))
        return bytes((await _read(Fleet(handle), "/v1/messages"))[-1])

    name, data = _run(ask()).split(b"\n")[:2]
    told = json.loads(data.removeprefix(b"data: "))
    assert (name, told["type"], told["error"]["type"]) == (b"event: error", "error", "overloaded_error")


def test_a_broken_whole_response_is_an_error() -> None:
    async def ask() -> None:
        await _read(Fleet(FakeHandle(saying("one", JSON, b"{", LOST))))

    with pytest.raises(ConnectionError, match="lost"):
        _run(ask())


def test_full_queues_refuse_requests() -> None:
    error = _error_of(saying(BackPressureError(7, 7)), saying("two", JSON))
    assert (error.status, error.code) == (503, "overloaded")


@pytest.mark.parametrize(
    "error", [RayTaskError("answer", "traceback", ValueError("x")), DeploymentUnavailableError("a")]
)
def test_other_failures_of_the_cluster_are_named_so(error: Exception) -> None:
    failed = _error_of(saying(error), saying("two", JSON))
    assert (failed.status, failed.code) == (500, "cluster_error")
    assert "traceback" not in failed.message


def test_closing_the_response_cancels_the_call() -> None:
    async def leave() -> None:
        handle = FakeHandle(_forever)
        fleet = Fleet(handle)
        async with aclosing(fleet.responses(_request())) as pieces:
            for _ in range(4):
                await anext(pieces)
            assert not handle.calls[0].cancelled
        assert handle.calls[0].cancelled
        await fleet.drain(0)  # no request is running any more

    _run(leave())


def test_a_reader_that_is_cancelled_cancels_the_call() -> None:
    async def leave() -> None:
        handle = FakeHandle(_forever)
        reading = asyncio.create_task(_read(Fleet(handle)))
        await asyncio.sleep(0.02)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert handle.calls[0].cancelled

    _run(leave())


def test_draining_waits_for_running_requests() -> None:
    released = asyncio.Event()

    async def slow(_: RoutedRequest) -> AsyncIterator[Any]:
        yield "one"
        yield JSON
        await released.wait()
        yield b"{}"

    async def drain() -> list[Any]:
        fleet = Fleet(FakeHandle(slow))
        reading = asyncio.create_task(_read(fleet))
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(fleet.drain(10))
        await asyncio.sleep(0.01)
        assert not draining.done()
        released.set()
        await draining
        return await reading

    assert _run(drain()) == ["one", JSON, b"{}"]


def test_draining_aborts_in_the_end() -> None:
    async def drain() -> list[Any]:
        fleet = Fleet(FakeHandle(_forever))
        reading = asyncio.create_task(_read(fleet))
        await asyncio.sleep(0.02)
        await fleet.drain(0.05)
        return await reading

    assert json.loads(_run(drain())[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"


def test_no_replica_is_tried_again_after_draining() -> None:
    async def lost(_: RoutedRequest) -> AsyncIterator[Any]:
        yield "one"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RayActorError from None

    async def drain() -> int:
        handle = FakeHandle(lost)
        fleet = Fleet(handle)
        reading = asyncio.create_task(_read(fleet))
        await asyncio.sleep(0.01)
        await fleet.drain(0)
        with pytest.raises(ApiError, match="lost"):
            await reading
        return len(handle.asked)

    assert _run(drain()) == 1


def test_silent_replicas_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.scale.front.ASKING_S", 0.1)
    handle = FakeHandle(saying(), told={"load": [("b", 2), RayActorError(), SILENT, ("a", 1)]})

    async def ask() -> dict[str, Any]:
        return await Fleet(handle).ask("load")

    assert list(_run(ask()).items()) == [("a", 1), ("b", 2)]


def test_replicas_are_asked_once_for_many_callers() -> None:
    async def ask() -> tuple[int, list[dict[str, Any]], int]:
        handle = FakeHandle(saying(), told={"load": [("a", 1)]})
        fleet, before = Fleet(handle), handle.broadcasts
        return before, await asyncio.gather(*(fleet.ask("load") for _ in range(5))), handle.broadcasts

    assert _run(ask()) == (0, 5 * [{"a": 1}], 1)


def test_a_request_waits_anew_after_a_lost_replica() -> None:
    async def never(_: RoutedRequest) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield "two"

    async def ask() -> None:
        await _read(Fleet(FakeHandle(saying("one", LOST), never), waits=0.1))

    with pytest.raises(ApiError, match="No replica took the request in 0.1 s") as caught:
        _run(ask())
    assert caught.value.status == 504


@pytest.mark.parametrize("error", [TimeoutError(), RayActorError(), DeploymentUnavailableError("a")])
def test_no_answer_is_no_replica(error: Exception) -> None:
    async def ask() -> dict[str, Any]:
        return await Fleet(FakeHandle(saying(), told={"load": error})).ask("load")

    assert _run(ask()) == {}


# --- the text by which the router finds a replica


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "prompt", "input", "content", "text", "cache_salt", "instructions", "x", "input_prefix"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


def text(body: Any = None, key: str | None = None, raw: bytes | None = None, user: str | None = None) -> str:
    """Return the text of a body."""
    content = json.dumps(body).encode() if raw is None else raw
    request = InsideRequest("POST", "/v1/chat/completions", content, user=user)
    found = routed(request, key)
    assert found.request is request
    return found.prompt


def test_a_conversation_begins_as_its_earlier_turns() -> None:
    short = text({"messages": CHAT})
    longer = [*CHAT, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
    assert text({"messages": longer, "temperature": 0}).startswith(short)
    assert "Be brief." in short
    parts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
    ]
    assert text({"messages": parts}) == short


def test_prompts_and_inputs_have_their_text() -> None:
    assert text({"prompt": "def f"}) == "def f"
    assert text({"prompt": ["def f", "def g"]}).startswith("def f")
    hole = {"input_prefix": "def f", "input_suffix": "x", "prompt": "y", "input_extra": [{"text": "a"}]}
    assert text(hole) == "a\ndef f"
    assert text({"input": "Hello.", "instructions": "Be brief."}) == "Be brief.\nHello."
    assert "Hello." in text({"input": CHAT})
    label, own = ({"type": "text", "text": each} for each in ("x-anthropic-billing-header: cch=1", "Be brief."))
    system = text({"messages": CHAT[1:], "system": [label, own]})
    assert system == text({"messages": CHAT[1:], "system": "Be brief."})
    assert system.startswith("Be brief.")


def test_token_ids_share_their_beginnings() -> None:
    assert text({"prompt": [1, 22, 3, 4]}).startswith(text({"prompt": [1, 22, 3]}))
    assert not text({"prompt": [12, 2]}).startswith(text({"prompt": [1, 22]}))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"null", b"\xff", b"[" * 100_000, b"{}", b'{"prompt": ""}'])
def test_a_body_without_a_prompt_has_a_text(raw: bytes) -> None:
    assert text(raw=raw)
    assert text(raw=raw, key="sk-1")


def test_keys_and_salts_are_kept_apart() -> None:
    body = {"prompt": "def f"}
    salted = {**body, "cache_salt": "a"}
    texts = [
        text(body),
        *(text(body, key) for key in ("sk-1", "sk-2")),
        text(salted),
        text({**body, "cache_salt": "b"}),
        text(salted, "sk-1"),
        text({**body, "cache_salt": "\ud800"}),
        *(text(body, key, user=user) for key in (None, "sk-1") for user in ("a", "b")),
    ]
    assert len({each[:8] for each in texts}) == len(texts)
    assert not any("sk-" in each for each in texts), "a key is in the router's texts"
    assert text(salted, "sk-1") == text(salted, "sk-1")


def test_texts_are_bounded() -> None:
    assert len(text({"prompt": "x" * 100_000}, "sk-1")) == MOST_CHARACTERS


def test_a_deep_salt_is_ignored() -> None:
    raw = b'{"prompt": "def f", "cache_salt": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert text(raw=raw) == "def f"


@given(VALUES, st.none() | st.just("sk-1"))
def test_any_json_has_a_text(body: Any, key: str | None) -> None:
    assert 0 < len(text(body, key)) <= MOST_CHARACTERS
