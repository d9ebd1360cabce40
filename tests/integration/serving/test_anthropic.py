"""Anthropic's Messages over HTTP: whole and streamed, errors, counts, and every documented field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic_core import from_json

from speculant import LLM, AsyncEngine, SamplingParams
from speculant.serving import MESSAGE_BODIES
from tests.documented_fields import ANTHROPIC
from tests.servers import LiveServer
from tests.tagged import CALLS_TEMPLATE, write_tagged

MESSAGES, COUNT = MESSAGE_BODIES
SIZES = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": name, "input_schema": SIZES} for name in ("cut", "sew")]
HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "sew", "arguments": {"size": 2}}\n</tool_call>'
THINK, THOUGHT = 258, 259
AT_ONCE = {"logit_bias": {str(THINK): -100}}  # without thinking
THINKING: dict[str, Any] = {
    "logit_bias": {str(THOUGHT): 4},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "seed": 5,
    "temperature": 1,
    "max_tokens": 400,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server of a small model whose template has calls, and reasoning between two tokens."""
    path = write_tagged(tmp_path_factory.mktemp("anthropic") / "model", CALLS_TEMPLATE, ("<think>", "</think>"))
    server = LiveServer(
        AsyncEngine(path, dtype="float32"), served_model_names=("model",), max_body_bytes=200_000
    ).ready()
    yield server
    server.stop()


def writing(text: str, **more: Any) -> dict[str, Any]:
    """Return the body of a message that has this text."""
    base = {"messages": HI, "max_tokens": 200, "temperature": 0, "structured_outputs": {"choice": [text]}}
    return {**base, **AT_ONCE, **more}


def assembled(server: LiveServer, **body: Any) -> dict[str, Any]:
    """Return the message that a stream has, by the names and the order that Anthropic documents for its events."""
    message: dict[str, Any] = {}
    is_open, arguments = False, ""
    with server.http.stream("POST", MESSAGES, json={**body, "stream": True}) as response:
        pairs = [each.split("\n") for each in response.read().decode().split("\n\n") if each]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [event["type"] for event in events]
    for event in events:
        kind, blocks = event["type"], message.get("content", [])
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append(event["content_block"])
            is_open, arguments = True, ""
        elif kind == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            (name, piece), *_ = ((key, value) for key, value in event["delta"].items() if key != "type")
            assert event["delta"]["type"] == {"partial_json": "input_json"}.get(name, name) + "_delta"
            if name == "partial_json":
                arguments += piece
                blocks[-1]["input"] = from_json(arguments, allow_partial=True)
            else:
                blocks[-1][name] += piece
        elif kind == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = False
        elif kind == "message_delta":
            assert not is_open
            assert sum_of(message["usage"]) == sum_of(event["usage"])
            message |= {**event["delta"], "usage": event["usage"]}
    assert [event["type"] for event in events].count("ping") == 1
    assert events[-1]["type"] == "message_stop"
    return message


def sum_of(usage: dict[str, Any]) -> int:
    """Return the tokens of the prompt."""
    return sum(value for name, value in usage.items() if name.endswith("input_tokens"))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to one request share."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = {"input": sum_of(message["usage"]), "output": message["usage"]["output_tokens"]}
    return {**message, "id": None, "content": content, "usage": usage}


def refused(server: LiveServer, path: str = MESSAGES, status: int = 400, **body: Any) -> str:
    """Return the message of an error, whose form is Anthropic's."""
    reply = server.http.post(path, json={"messages": HI, "max_tokens": 4, **body})
    told = reply.json()
    assert (reply.status_code, set(told)) == (status, {"type", "error", "request_id"})
    assert set(told["error"]) - {"details"} == {"type", "message"}
    assert told["type"] == "error"
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return str(told["error"]["type"] + ": " + told["error"]["message"])


# --- answers


@pytest.mark.parametrize(
    ("body", "kinds", "reason"),
    [
        (writing("plain text"), ["text"], "end_turn"),
        (writing("plain text", max_tokens=5), ["text"], "max_tokens"),
        (writing("plain text", stop_sequences=["z", "in"]), ["text"], "stop_sequence"),
        (writing(CALL, tools=TOOLS), ["tool_use"], "tool_use"),
        (writing(f"I will {CALL}", tools=TOOLS), ["text", "tool_use"], "tool_use"),
        (writing(f"{CALL}\n{CALL}", tools=TOOLS), ["tool_use", "tool_use"], "tool_use"),
        (writing(f"so {CALL} and {CALL} on", tools=TOOLS),
         ["text", "tool_use", "text", "tool_use", "text"], "tool_use"),
        (writing(f"{CALL}\n{CALL}", tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}),
         ["tool_use"], "tool_use"),
        (writing(CALL, tools=TOOLS, max_tokens=len(CALL) - 20), ["tool_use"], "max_tokens"),
        (writing(CALL, tools=TOOLS, stop_sequences=['size"']), ["tool_use"], "stop_sequence"),
        (writing(f"well {CALL}", tools=TOOLS, **THINKING), ["thinking", "text", "tool_use"], "tool_use"),
        (writing("yes", **{**THINKING, "thinking": {"type": "adaptive", "display": "omitted"}}), ["thinking", "text"],
         "end_turn"),
        ({"messages": HI, "max_tokens": 4000, "ignore_eos": True, **AT_ONCE}, ["text"],
         "model_context_window_exceeded"),
    ],
)  # fmt: skip
def test_a_stream_has_the_whole_message(live: LiveServer, body: dict[str, Any], kinds: list[str], reason: str) -> None:
    whole = live.post(MESSAGES, **{"seed": 3, **body})
    assert [block["type"] for block in whole["content"]] == kinds
    assert (whole["stop_reason"], whole["role"], whole["type"]) == (reason, "assistant", "message")
    assert whole["stop_sequence"] == {"stop_sequence": body.get("stop_sequences", [None])[-1]}.get(reason)
    assert whole["usage"].pop("output_tokens_details")["thinking_tokens"] == 0 or "thinking" in kinds
    assert without_ids(assembled(live, **{"seed": 3, **body})) == without_ids(whole)


def test_a_text_is_that_of_a_seed(demo: LiveServer) -> None:
    """Of the same conversation in one more route, and of `LLM`."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def f(x):"}]
    (block,) = demo.post(MESSAGES, system=chat[0]["content"], messages=chat[1:], **settings)["content"]
    choice = demo.post("/v1/chat/completions", messages=chat, **settings)["choices"][0]
    (output,) = LLM("demo", draft_model="demo").chat(chat, SamplingParams(**settings))
    assert block["text"] == choice["message"]["content"] == output.outputs[0].text


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "sew"}, {"type": "any", "disable_parallel_tool_use": True}]
)
def test_a_forced_call_is_a_block(live: LiveServer, choice: dict[str, Any]) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "boolean"}}}
    for more in ({}, {"output_config": form}):  # the form of a text has no effect on calls
        body = {"messages": HI, "max_tokens": 200, "seed": 4, "tools": TOOLS, "tool_choice": choice, **AT_ONCE, **more}
        whole = live.post(MESSAGES, **body)
        assert {block["type"] for block in whole["content"]} == {"tool_use"}
        if len(choice) > 1:
            assert len(whole["content"]) == 1
        for block in whole["content"]:
            assert block["name"] in ([choice["name"]] if "name" in choice else ["cut", "sew"])
        assert without_ids(assembled(live, **body)) == without_ids(whole)


def test_a_prefilled_answer_goes_on(live: LiveServer) -> None:
    begun = [*HI, {"role": "assistant", "content": "The best answer is ("}]
    whole = live.post(MESSAGES, **writing("B)", messages=begun))
    assert whole["content"] == [{"type": "text", "text": "B)"}]
    closed = live.post(MESSAGES, **writing("B)", messages=[*begun, {"role": "user", "content": ""}]))
    assert sum_of(whole["usage"]) == sum_of(closed["usage"]) - len("[end][user][end][assistant]")


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_goes_back_into_the_prompt(live: LiveServer, display: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
    first = live.post(MESSAGES, **writing("yes", **{**THINKING, "thinking": thinking}))
    shown = live.post(MESSAGES, **writing("yes", **THINKING))
    assert bool(first["content"][0]["thinking"]) is (display == "summarized")
    sizes = set()
    for answer in (first, shown):
        turns = [*HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "so?"}]
        sizes.add(sum_of(live.post(MESSAGES, messages=turns, max_tokens=1)["usage"]))
    bare = [*HI, {"role": "assistant", "content": first["content"][1:]}, {"role": "user", "content": "so?"}]
    (size,) = sizes
    assert size > live.post(COUNT, messages=bare)["input_tokens"]


def test_tokens_are_listed_once_each(live: LiveServer) -> None:
    body = writing(f"a {CALL} b", tools=TOOLS, speculant={"tokens": True})
    events = [json.loads(each) for each in live.events(MESSAGES, **body)]
    tokens = [token["text"] for event in events for token in event.get("speculant_tokens", ())]
    assert "".join(tokens) == f"a {CALL} b"


# --- prompts

RESULT = {"type": "tool_result", "tool_use_id": "call_1"}
LOOP: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I will"},
        {"type": "tool_use", "id": "call_1", "name": "sew", "input": {"size": 2}},
    ]},
    {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "done"}], "is_error": True}]},
    {"role": "user", "content": "and?"},
]  # fmt: skip
AS_CHAT: list[Any] = [
    {"role": "system", "content": "Be\nbrief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I will", "reasoning_content": "hm", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "sew", "arguments": '{"size":2}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Error:\ndone"},
    {"role": "user", "content": "and?"},
]  # fmt: skip


def test_a_conversation_has_the_prompt_of_its_chat(live: LiveServer) -> None:
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={count};"} for count in range(2)]
    system += [{"type": "text", "text": text} for text in ("Be", "brief.")]
    tools = [{"type": "function", "function": {"name": tool["name"], "parameters": SIZES}} for tool in TOOLS]
    expected = live.post("/tokenize", messages=AS_CHAT, tools=tools)["count"]
    assert live.post(COUNT, system=system, messages=LOOP, tools=TOOLS) == {"input_tokens": expected}


@pytest.mark.parametrize(
    "more",
    [{}, {"system": "Be brief."}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "none"}},
     {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "disabled"}},
     {"messages": LOOP, "tools": TOOLS}, {"messages": [*HI, {"role": "assistant", "content": "so"}]},
     {"messages": [*HI, {"role": "system", "content": "now"}, *HI]}, {"output_config": {"effort": "max"}}],
)  # fmt: skip
def test_a_count_is_the_usage(live: LiveServer, more: dict[str, Any]) -> None:
    body = {"messages": HI, **more}
    usage = live.post(MESSAGES, max_tokens=1, **body)["usage"]
    assert live.post(COUNT, **body) == {"input_tokens": sum_of(usage)}


def test_the_cache_serves_the_turns_of_claude_code(live: LiveServer) -> None:
    """Its label for billing, the first block of a prompt, differs in each request."""
    usage = {}
    for turn in ("a", "b"):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"},
                  {"type": "text", "text": "You are an agent. " * 20}]  # fmt: skip
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        usage = live.post(MESSAGES, system=system, messages=HI, max_tokens=1, context_management=edits)["usage"]
    assert usage["cache_read_input_tokens"] > 200
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] > 0


# --- errors


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
        ({"messages": [*LOOP[:2], {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]},
         "'image'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "'call_1'"),
        ({"messages": LOOP[:2]}, "tool_result"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "no text"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"system": [5]}, "system"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "defer_loading"),
        ({"tools": [{**TOOLS[0], "input_examples": [{}]}]}, "input_examples"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "glue"}}, "glue"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"thinking": {"type": "often"}}, "thinking"),
        ({"output_config": {"task_budget": 5}}, "task_budget"),
        ({"output_config": {"effort": "some"}}, "effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"thread": {"type": "create"}}, "whole conversation"),
        ({"n": 2}, "n is"),
        ({"stop": ["x"]}, "stop_sequences"),
        ({"max_completion_tokens": 5}, "use max_tokens"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ],
)  # fmt: skip
def test_other_fields_are_refused_by_name(live: LiveServer, body: dict[str, Any], text: str) -> None:
    said = refused(live, **body)
    assert said.startswith("invalid_request_error: ")
    assert text in said


@pytest.mark.parametrize("size", [1100, 20_000, 150_000])
def test_agents_understand_that_a_prompt_is_too_long(live: LiveServer, size: int) -> None:
    turns = [{"role": "user", "content": "x" * size}]
    for stream in (False, True):
        said = refused(live, messages=turns, stream=stream)
        assert said.startswith("invalid_request_error: The prompt is too long: ")
    if size == 1100:
        assert f"{size + len('[user][end][assistant]')} tokens > 1023 maximum" in said
        assert live.post(COUNT, messages=turns)["input_tokens"] > size


@pytest.mark.parametrize(
    ("path", "status", "body", "kind"),
    [(MESSAGES, 404, {"model": "claude"}, "not_found_error"), (f"{MESSAGES}/batches", 404, {}, "not_found_error"),
     (MESSAGES, 413, {"system": "x" * 300_000}, "request_too_large"),
     (COUNT, 404, {"model": "claude"}, "not_found_error")],
)  # fmt: skip
def test_errors_of_all_layers_have_anthropic_s_form(
    live: LiveServer, path: str, status: int, body: dict[str, Any], kind: str
) -> None:
    assert refused(live, path, status, **body).startswith(kind)


def test_a_stream_that_fails_ends_with_an_error(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculant.serving.anthropic.messages.MessageAnswer.end", lambda _: 1 / 0)
    *_, last = live.events(MESSAGES, messages=HI, max_tokens=2)
    assert json.loads(last)["error"]["type"] == "api_error"
    assert set(json.loads(last)) == {"type", "error", "request_id"}


def test_models_are_listed_for_anthropic_s_clients(live: LiveServer) -> None:
    plain = live.http.get("/v1/models").json()
    shown = live.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert "has_more" not in plain
    assert (shown["first_id"], shown["last_id"], shown["has_more"]) == ("model", "model", False)
    assert shown["data"][0] | plain["data"][0] == shown["data"][0]
    assert shown["data"][0]["type"] == "model"


# --- fields


@pytest.mark.parametrize("name", ANTHROPIC)
def test_a_documented_field_is_never_dropped(live: LiveServer, name: str) -> None:
    value, does = ANTHROPIC[name]
    beside = {"tools": TOOLS} if name == "tool_choice" else {}
    base = {"messages": HI, "max_tokens": 16, "seed": 5, "temperature": 1.0, **AT_ONCE, **beside}
    reply = live.http.post(MESSAGES, json={**base, name: value})
    if does == "refuses":
        assert reply.json()["error"]["message"].startswith(name)
        return
    plain = live.post(MESSAGES, **base)
    assert reply.status_code == 200, reply.text
    is_same = without_ids(reply.json()) == without_ids(plain)
    assert is_same is (does == "accepts")
    assert (name in MESSAGE_BODIES[MESSAGES].model_fields) or does == "accepts"
