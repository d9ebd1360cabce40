"""The certain part of a chat's next prompt, and what clients send to /v1/prefill, is read while nothing runs."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from speculant import AsyncEngine, SamplingParams
from speculant.engine import Engine
from speculant.errors import EngineClosedError
from speculant.serving import Prompts, TextLanes, answers, certain
from speculant.types import Client
from tests.models import Shape
from tests.servers import LiveServer, serve
from tests.tagged import CALLS_TEMPLATE, write_tagged

__all__ = ["serve"]

TOOLS = [{"type": "function", "function": {"name": "cut", "parameters": {"type": "object", "properties": {}}}}]
FORGETFUL = """{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content and loop.index0 > last.user %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}[end]
{%- endfor %}{% if add_generation_prompt %}[assistant]<think>{% endif %}{# </think> #}"""
SALUTATION: list[Any] = [{"role": "user", "content": "Tell me about ships, sails and rudders. " * 6}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return checkpoints with templates, by name."""
    templates = {"calls": CALLS_TEMPLATE, "forgetful": FORGETFUL, "broken": "{{ raise_exception('no') }}"}
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return {
        name: write_tagged(tmp_path_factory.mktemp(name) / "model", template, tags, Shape(max_positions=2048))
        for name, template in templates.items()
    }


def engine_of(folder: str, **arguments: Any) -> AsyncEngine:
    return AsyncEngine(folder, max_num_seqs=4, dtype="float32", **arguments)


def totals(server: LiveServer) -> tuple[int, int]:
    """Return the tokens prepared, and those used."""
    metrics = server.state.loaded.metrics  # type: ignore[union-attr]
    return metrics.prepared_tokens, metrics.prepared_tokens_used


def settled(server: LiveServer) -> tuple[int, int]:
    """Return the totals once nothing more is prepared."""
    last, since = totals(server), time.monotonic()
    while time.monotonic() - since < 0.5:
        if (now := totals(server)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.01)
    return last


def chat(server: LiveServer, messages: Sequence[Any], **fields: Any) -> tuple[dict[str, Any], int]:
    """Return the message of an answer, and how many tokens of the prompt were cached."""
    answer = server.post("/v1/chat/completions", messages=messages, **{**GREEDY, **fields})
    return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("template", ["calls", "forgetful"])
def test_the_next_turn_is_known(serve: Any, folders: dict[str, str], template: str) -> None:
    """A template that drops the reasoning of earlier turns writes another history, which is read before it is sent."""
    found = dict[bool, list[Any]]()
    for ahead in (True, False):
        server: LiveServer = serve(lambda: engine_of(folders[template]), turns_ahead=ahead).ready()
        message, _ = chat(server, SALUTATION)
        settled(server)
        turn = [*SALUTATION, message, {"role": "user", "content": "And tides?"}]
        found[ahead] = [message, *chat(server, turn)]
        prepared, used = totals(server)
        assert (prepared > 0, used > 0) == (ahead, ahead)
        assert used <= prepared
    assert found[True][:2] == found[False][:2], "other texts"
    missing = [len(prompt_of(folders[template], turn)) - found[ahead][2] for ahead in (True, False)]
    assert missing[0] < missing[1]
    assert missing[0] < 16 + 40, "more is missing than the new message and the rest of a block"


def prompt_of(folder: str, messages: Sequence[Any]) -> Sequence[int]:
    """Return the tokens of a conversation."""

    async def main() -> Sequence[int]:
        async with engine_of(folder) as engine:
            return engine.tokenizer.encode(engine.render_chat(messages).text, add_special_tokens=False)

    return asyncio.run(main())


@pytest.mark.parametrize("shape", ["chat", "streamed", "response", "message"])
def test_every_shape_of_a_chat_has_turns_ahead(serve: Any, folders: dict[str, str], shape: str) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"])).ready()
    text = SALUTATION[0]["content"]
    if shape == "chat":
        chat(server, SALUTATION)
    elif shape == "streamed":
        server.chunks("/v1/chat/completions", messages=SALUTATION, **GREEDY)
    elif shape == "response":
        server.post("/v1/responses", input=text, temperature=0, max_output_tokens=40)
    else:
        server.post("/v1/messages", messages=SALUTATION, max_tokens=40, temperature=0)
    assert settled(server)[0] > 0


@pytest.mark.parametrize(
    ("template", "fields"),
    [
        ("calls", {"n": 2, "seed": 1, "temperature": 1.0}),
        ("calls", {"truncate_prompt_tokens": 100}),
        ("calls", {"add_generation_prompt": False}),
    ],
)
def test_nothing_is_prepared_where_nothing_is_certain(
    serve: Any, folders: dict[str, str], template: str, fields: dict[str, Any]
) -> None:
    server: LiveServer = serve(lambda: engine_of(folders[template])).ready()
    chat(server, SALUTATION, **fields)
    assert settled(server) == (0, 0)


def test_completions_have_no_turns(serve: Any, folders: dict[str, str]) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"])).ready()
    server.post("/v1/completions", prompt="Ships " * 20, **GREEDY)
    assert settled(server) == (0, 0)


def test_nothing_is_prepared_without_a_prefix_cache(serve: Any, folders: dict[str, str]) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"], enable_prefix_caching=False)).ready()
    chat(server, SALUTATION)
    assert settled(server) == (0, 0)
    status, reply = prefill(server, messages=SALUTATION)
    assert (status, "prefix caching is off" in reply["error"]["message"]) == (400, True)


def test_a_busy_server_prepares_nothing(serve: Any, folders: dict[str, str]) -> None:
    """Nor is anything rendered: it would take the processor from the requests."""
    server: LiveServer = serve(lambda: engine_of(folders["calls"])).ready()
    with server.state.admission.admit(1, Client("other")):
        chat(server, SALUTATION)
        assert settled(server) == (0, 0)
    assert settled(server) == (0, 0)


def test_the_next_request_ends_the_work_for_its_client(
    serve: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculant.serving.openai.ahead.PAUSE_S", 0.3)
    server: LiveServer = serve(lambda: engine_of(folders["calls"]), api_keys=("one", "two")).ready()
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"messages": SALUTATION, **GREEDY}
    for after, prepares in ((one, False), (two, True)):
        assert server.http.post("/v1/chat/completions", json=body, headers=one).status_code == 200
        assert server.http.post("/tokenize", json={"prompt": "a"}, headers=after).status_code == 200
        assert (settled(server)[0] > 0) == prepares


def test_a_call_is_followed_by_the_header_of_its_result(folders: dict[str, str]) -> None:
    """Whatever the result is, the prompt of the next turn begins with what is certain."""
    from speculant.serving import ChatBody, MessageReader, ServerOptions, ToolDelta

    async def main() -> None:
        async with engine_of(folders["calls"]) as engine:
            prompts = Prompts(TextLanes(4), ServerOptions(), "client", 0)
            body = ChatBody.model_validate({"messages": SALUTATION, "tools": TOOLS})
            reader = MessageReader()
            reader.message.calls.append(ToolDelta(0, "call_1", "cut", "{}"))
            (answer,) = answers(reader, body.messages)
            tokens = await certain(prompts, engine, body, answer, asyncio.to_thread)
            text = engine.tokenizer.decode(tokens, skip_special_tokens=False)
            assert text.endswith("</tool_call>[end][tool")
            result = {"role": "tool", "tool_call_id": "call_1", "content": "A result."}
            turn = [*SALUTATION, answer.model_dump(exclude_none=True), result]
            whole = engine.render_chat(turn, TOOLS).text
            assert whole.startswith(text)

    asyncio.run(main())


def test_a_template_that_fails_is_ignored(folders: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    from speculant.errors import SpeculantError
    from speculant.serving import ChatBody, MessageReader, ServerOptions

    async def main() -> None:
        async with engine_of(folders["broken"]) as engine:
            prompts = Prompts(TextLanes(4), ServerOptions(), "client", 0)
            body = ChatBody.model_validate({"messages": SALUTATION})
            (answer,) = answers(MessageReader(), body.messages)
            with pytest.raises(SpeculantError):
                await certain(prompts, engine, body, answer, asyncio.to_thread)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [((), [True, False]), ((None,), [False]), (("Hm.",), [True]), (("Hm.", None), [True, False])],
)
def test_reasoning_comes_back_as_before(earlier: Sequence[str | None], expected: list[bool]) -> None:
    from speculant.serving import Message, MessageReader

    reader = MessageReader()
    reader.message.reasoning, reader.message.content = "Well.", "Yes."
    before = [Message(role="assistant", content="No.", reasoning_content=thought) for thought in earlier]
    assert [each.reasoning_content is not None for each in answers(reader, before)] == expected


# --- /v1/prefill


def prefill(server: LiveServer, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = server.http.post("/v1/prefill", json=body)
    return reply.status_code, reply.json()


@pytest.mark.parametrize("body", [{"messages": SALUTATION}, {"prompt": "Ships and sails. " * 20}], ids=["chat", "text"])
def test_a_prompt_that_was_sent_ahead_is_found(serve: Any, folders: dict[str, str], body: dict[str, Any]) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"]), turns_ahead=False).ready()
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, first = prefill(server, **body)
    assert (status, first["object"], first["cached_tokens"]) == (202, "prefill", 0)
    status, waited = prefill(server, **body, wait=True)
    size = first["prompt_tokens"]
    assert (status, waited["prompt_tokens"], waited["cached_tokens"]) == (200, size, size // 16 * 16)
    usage = server.post(route, **body, **GREEDY)["usage"]
    assert usage["prompt_tokens"] == size
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(size - 1, size // 16 * 16)
    assert totals(server) == (size // 16 * 16,) * 2


EVERYTHING = """{% for each in tools or [] %}{{ each | tojson }}{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}
{%- for each in documents or [] %}{{ each.text }}{% endfor %}
{%- for each in messages %}[{{ each.role }}]{{ each.content }}{% if not loop.last %}[end]{% endif %}{% endfor %}
{%- if add_generation_prompt %}[end][assistant]{% endif %}"""
MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
OTHER_TOOL = {"type": "function", "function": {"name": "sew", "parameters": {"type": "object", "properties": {}}}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOLS[0]]}}
ASKED: list[Any] = [{"role": "user", "content": "Tell me about sails. " * 4}]
LONG: list[Any] = [{"role": "user", "content": "Tell me about ships, sails and rudders. " * 40}]
CHATS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS},
    "no tools": {"tools": TOOLS, "tool_choice": "none"},
    "allowed tools": {"tools": [OTHER_TOOL, *TOOLS], "tool_choice": ALLOWED},
    "required tool": {"tools": TOOLS, "tool_choice": "required"},
    "no header": {"add_generation_prompt": False},
    "continued": {
        "messages": [*ASKED, {"role": "assistant", "content": "They"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "variables": {"chat_template_kwargs": {"enable_thinking": True}},
    "effort": {"reasoning_effort": "high"},
    "documents": {"documents": [{"title": "A", "text": "A text on sails."}]},
    "special tokens": {"add_special_tokens": True},
    "cut": {"truncate_prompt_tokens": 40, "truncation_side": "left"},
    "cut for the answer": {"messages": LONG, "truncate_prompt_tokens": -1, "max_tokens": 100},
    "cut for another answer": {"messages": LONG, "truncate_prompt_tokens": -1, "max_completion_tokens": 90},
    "cut for any answer": {"messages": LONG, "truncate_prompt_tokens": -1, "max_tokens": None},
}
TEXT, TEXTS = ASKED[0]["content"], LONG[0]["content"]
COMPLETIONS: dict[str, dict[str, Any]] = {
    "ids": {"prompt": [*range(3, 90)]},
    "an object": {"prompt": {"prompt": TEXT}},
    "suffix": {"prompt": TEXT, "suffix": "And more."},
    "no special tokens": {"prompt": TEXT, "add_special_tokens": False},
    "cut": {"prompt": TEXT, "truncate_prompt_tokens": 40, "truncation_side": "right"},
    "cut for the answer": {"prompt": TEXTS, "truncate_prompt_tokens": -1, "max_tokens": 100},
    "cut for the usual answer": {"prompt": TEXTS, "truncate_prompt_tokens": -1, "max_tokens": None},
}
PREPARED = [
    *(("/v1/chat/completions", {"messages": ASKED, **fields}) for fields in CHATS.values()),
    *(("/v1/completions", fields) for fields in COMPLETIONS.values()),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("/v1/chat/completions", {"messages": ASKED, **fields})
        for fields in (
            {"tools": [{"x": 1}]},
            {"tools": TOOLS * 200},
            {"tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "knit"}}},
            {"truncate_prompt_tokens": 9, "truncation_side": "right"},
            {"truncate_prompt_tokens": 0},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"chat_template": "{{ 1 }}"},
            {"suffix": "x"},
            {"cache_salt": "a\0"},
        )
    ),
    *(
        ("/v1/completions", fields)
        for fields in (
            {"prompt": [5, 6], "suffix": "x"},
            {"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 3},
            {"prompt": "a", "truncate_prompt_tokens": 0},
            {"prompt": {"prompt": "a", "cache_salt": "b"}},
            {"prompt": ["a"] * 2000},
            {"prompt": "a", "tools": TOOLS},
            {"prompt": "a", "cache_salt": "a\0"},
        )
    ),
]


@pytest.fixture(scope="module")
def all_fields(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose prompts depend on all fields that can change one."""
    folder = tmp_path_factory.mktemp("fields") / "model"
    path = write_tagged(folder, EVERYTHING, MARKS, Shape(max_positions=256), special=True)
    server = LiveServer(lambda: engine_of(path), turns_ahead=False, tool_parser="hermes").ready()
    yield server
    server.stop()


@pytest.mark.parametrize(("route", "body"), PREPARED, ids=[*CHATS, *COMPLETIONS])
def test_the_prompt_that_is_prepared_is_that_of_the_request(
    all_fields: LiveServer, route: str, body: dict[str, Any]
) -> None:
    sent = {"temperature": 0, "max_tokens": 4, "cache_salt": str(body), **body}
    status, first = prefill(all_fields, **sent, wait=True)
    assert status == 200, first
    size = first["prompt_tokens"]
    assert first["cached_tokens"] == size // 16 * 16
    usage = all_fields.post(route, **sent)["usage"]
    assert (usage["prompt_tokens"], size >= 32) == (size, True)
    assert usage["prompt_tokens_details"]["cached_tokens"] == min(size - 1, size // 16 * 16)


@pytest.mark.parametrize(("route", "body"), REFUSED, ids=lambda value: str(value)[-60:])
def test_a_prompt_that_its_route_refuses_is_not_prepared(
    all_fields: LiveServer, route: str, body: dict[str, Any]
) -> None:
    reply = all_fields.http.post(route, json=body)
    assert reply.status_code == 400
    assert prefill(all_fields, **body) == (400, reply.json())


def test_keys_and_salts_are_apart(serve: Any, folders: dict[str, str]) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"]), turns_ahead=False, api_keys=("one", "two")).ready()
    body = {"messages": SALUTATION}

    def cached(key: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {key}"}
        answer = server.http.post("/v1/chat/completions", json={**body, **GREEDY, **fields}, headers=headers).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert server.http.post("/v1/prefill", json=body).status_code == 401
    sent = {**body, "wait": True, "cache_salt": "mine"}
    assert server.http.post("/v1/prefill", json=sent, headers={"authorization": "Bearer one"}).status_code == 200
    assert cached("two", cache_salt="mine") == 0
    assert cached("one") == 0
    assert cached("one", cache_salt="mine") > 0


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        ({}, 400, "Send either prompt or messages"),
        ({"prompt": "a", "messages": SALUTATION}, 400, "Send either prompt or messages"),
        ({"prompt": "a", "model": "other"}, 404, "does not exist"),
        ({"prompt": "a " * 5000}, 400, "too long"),
        ({"prompt": [1, 2, 10**6]}, 400, "not a token id"),
        ({"messages": []}, 400, "messages"),
        ({"prompt": "a", "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ],
)
def test_errors_are_those_of_other_routes(
    serve: Any, folders: dict[str, str], body: dict[str, Any], status: int, problem: str
) -> None:
    server: LiveServer = serve(lambda: engine_of(folders["calls"]), max_prompt_characters=8000).ready()
    found, reply = prefill(server, **body)
    assert found == status, reply
    assert problem in json.dumps(reply)


def test_a_wait_has_the_deadline_of_a_first_token(
    serve: Any, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests leave no time for it."""
    monkeypatch.setattr("speculant.engine.engine.Engine._prepare", lambda engine: time.sleep(0.01))
    server: LiveServer = serve(lambda: engine_of(folders["calls"]), first_token_timeout=0.3).ready()
    status, reply = prefill(server, prompt="Ships and sails. " * 20, wait=True)
    assert (status, "was not read after 0.3 s" in reply["error"]["message"]) == (504, True)


# --- the engine's thread


def test_preparations_end_with_the_engine(folders: dict[str, str]) -> None:
    """Draining does not wait for them, and who waits for one is told how far it came."""

    async def main() -> None:
        engine = engine_of(folders["calls"])
        begun = [await engine.prefill([1 + place, *range(3, 90), *range(3, 90)] * 8) for place in range(4)]
        await engine.shutdown(drain=True)
        results = [each.done.result(5) for each in begun]
        assert sum(results) == engine.metrics.prepared_tokens < 4 * 1392
        with pytest.raises(EngineClosedError):
            await engine.prefill([1, 2, 3])

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_while_a_prefix_is_looked_up_ends(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for the preparation is answered, and shutting down ends."""

    async def main() -> None:
        engine = engine_of(folders["calls"])
        begun = await engine.prefill([*range(3, 90)] * 8)
        thread = engine._thread

        def die(inner: Engine) -> None:
            own = inner._preparations
            with monkeypatch.context() as broken:
                broken.setattr(own._cache, "release", sys.exit)
                own._look_up(begun.request)

        thread._inbox.put(die)
        async with asyncio.timeout(20):
            await asyncio.wrap_future(begun.done)
            await engine.shutdown(drain=True)
        assert not engine.is_alive

    asyncio.run(main())


def test_requests_and_preparations_do_not_wait_for_each_other(folders: dict[str, str]) -> None:
    """The same tokens, whenever requests arrive."""

    async def main(prepares: bool) -> list[list[int]]:
        async with engine_of(folders["calls"]) as engine:
            outputs = []
            for place in range(6):
                prompt = [4 + place, *range(3, 60)] * 6
                if prepares:
                    await engine.prefill(prompt[: 300 - 7 * place])
                    await engine.prefill([5, *prompt])
                    await asyncio.sleep(0.01 * place)
                output = await engine.generate(prompt, SamplingParams(temperature=0.9, max_tokens=5))
                outputs.append(output.outputs[0].token_ids)
            return outputs

    assert asyncio.run(main(True)) == asyncio.run(main(False))


def test_a_client_that_leaves_cancels_nothing(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engine_of(folders["calls"]) as engine:
            begun = await engine.prefill([*range(3, 90)] * 4)
            waiting = asyncio.ensure_future(asyncio.wrap_future(begun.done))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with asyncio.timeout(20):
                while not begun.done.done():
                    await asyncio.sleep(0.01)
            assert begun.done.result() == 336
            assert await engine.generate([1, 2], SamplingParams(max_tokens=1))

    asyncio.run(main())
