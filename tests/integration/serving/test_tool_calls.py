"""Reasoning and tool calls over HTTP, for a model whose template has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.examples import examples
from tests.models import ALPHABET, END, Shape
from tests.servers import LiveServer
from tests.tagged import HARMONY, HARMONY_TEMPLATE, write_tagged

TEMPLATE = """{%- if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif -%}
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor -%}"""
PARAMETERS = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("cut", "sew")]
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_completion_tokens": 120,
    "temperature": 0,
    "tools": TOOLS,
    "logit_bias": {str(ALPHABET.index(space)): -100 for space in "ĠĊĉč"},  # else the JSON may never end
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from started(tmp_path_factory.mktemp("tools") / "model", TEMPLATE)


@pytest.fixture(scope="module")
def without_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    yield from started(tmp_path_factory.mktemp("no_tools") / "model", "{{ messages }}")


def started(folder: Path, template: str) -> Iterator[LiveServer]:
    engine = AsyncEngine(write_tagged(folder, template), dtype="float32")
    live = LiveServer(engine, per_request_spec_decode_metrics="summary").ready()
    yield live
    live.stop()


def test_a_required_call_is_parsed(server: LiveServer) -> None:
    (choice,) = server.post("/v1/chat/completions", **BODY, tool_choice="required")["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("cut", "sew")
    assert json.loads(call["function"]["arguments"])["size"] in (1, 2)


def test_a_named_call_streams_as_deltas(server: LiveServer) -> None:
    named = {"type": "function", "function": {"name": "sew"}}
    whole = server.post("/v1/chat/completions", **BODY, tool_choice=named)["choices"][0]["message"]["tool_calls"]
    chunks = server.chunks("/v1/chat/completions", **BODY, tool_choice=named)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [each for choice in choices for each in choice["delta"].get("tool_calls", [])]
    assert (deltas[0]["function"]["name"], deltas[0]["index"]) == ("sew", 0)
    assert deltas[0]["id"].startswith("call_")
    arguments = "".join(delta["function"]["arguments"] for delta in deltas)
    assert arguments == whole[0]["function"]["arguments"]
    assert not any(choice["delta"].get("content") for choice in choices)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"], "as OpenAI's"


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [{}]},
        {"tools": None, "tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "glue"}}},
        {"tools": TOOLS * 100},
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
    ],
    ids=["no function", "no tools", "unknown", "too many", "two forms"],
)
def test_invalid_tools_are_refused(server: LiveServer, given: dict[str, Any]) -> None:
    response = server.http.post("/v1/chat/completions", json={**BODY, **given})
    assert response.status_code == 400


def test_several_calls_are_parsed(server: LiveServer) -> None:
    """Unless the request wants only one, a line break and another call may follow a call."""
    bias = {key: value for key, value in BODY["logit_bias"].items() if key != str(ALPHABET.index("Ċ"))}
    body = {**BODY, "logit_bias": {**bias, str(END): -100}, "tool_choice": "required", "max_completion_tokens": 300}
    message = server.post("/v1/chat/completions", **body)["choices"][0]["message"]
    assert len(message["tool_calls"]) > 1
    for call in message["tool_calls"][:-1]:
        assert json.loads(call["function"]["arguments"])["size"] in (1, 2)
    alone = server.post("/v1/chat/completions", **body, parallel_tool_calls=False)["choices"][0]
    assert (len(alone["message"]["tool_calls"]), alone["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "sew"}}, "stop")],
    ids=["required", "named"],
)
def test_a_forced_call_is_a_call_whatever_the_template(without_tools: LiveServer, choice: Any, reason: str) -> None:
    """Also where the template's format is not known."""
    body = {**BODY, "tool_choice": choice, "parallel_tool_calls": False, "logit_bias": {}}
    (answer,) = without_tools.post("/v1/chat/completions", **body)["choices"]
    assert (answer["finish_reason"], answer["message"]["content"]) == (reason, None)
    (call,) = answer["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["size"] in (1, 2)
    chunks = without_tools.chunks("/v1/chat/completions", **body)
    choices = [each for chunk in chunks for each in chunk["choices"]]
    deltas = [each for each in (choice["delta"].get("tool_calls") for choice in choices) if each]
    assert "".join(delta["function"]["arguments"] for (delta,) in deltas) == call["function"]["arguments"]
    assert not any(each["delta"].get("content") for each in choices)
    assert choices[-1]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("cut", "reason", "incomplete"),
    [({"stop": ['ize":']}, "stop", {}), ({"max_tokens": 45}, "length", {"reason": "max_output_tokens"})],
    ids=["stop string", "limit"],
)
def test_a_call_that_is_cut_is_not_complete(server: LiveServer, cut: Any, reason: str, incomplete: Any) -> None:
    """Its arguments end where the text ends, and nothing says that the call may be run."""
    body = {**BODY, "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": None, **cut}
    (choice,) = server.post("/v1/chat/completions", **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == reason
    assert '{"size":1}'.startswith(call["function"]["arguments"])
    assert 0 < len(call["function"]["arguments"]) < len('{"size":1}')
    chunks = [each for chunk in server.chunks("/v1/chat/completions", **body) for each in chunk["choices"]]
    deltas = [delta["function"]["arguments"] for each in chunks for delta in each["delta"].get("tool_calls") or ()]
    assert "".join(deltas) == call["function"]["arguments"]
    assert [each["finish_reason"] for each in chunks if each["finish_reason"]] == [reason]

    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    given = {"input": "hi", "tools": tools, "tool_choice": "required", "logit_bias": BODY["logit_bias"], **cut}
    settings = {**given, "temperature": 0, "parallel_tool_calls": False}
    whole = server.post("/v1/responses", **settings)
    last = json.loads([*server.events("/v1/responses", **settings)][-1])
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", incomplete)
        (item,) = response["output"]
        assert (item["status"], item["arguments"]) == ("incomplete", call["function"]["arguments"])


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server of a model with gpt-oss's template and tags, whose drafts are nearly right."""
    folder = tmp_path_factory.mktemp("harmony")
    shapes = [("target", Shape(max_positions=1024)), ("near", Shape(max_positions=1024, noise=0.1))]
    paths = [write_tagged(folder / name, HARMONY_TEMPLATE, HARMONY, shape, special=True) for name, shape in shapes]
    live = LiveServer(AsyncEngine(paths[0], draft_model=paths[1], dtype="float32")).ready()
    yield live
    live.stop()


@pytest.mark.parametrize("forced", ["call", "form"])
def test_channels_are_read_with_and_without_speculation(harmony: LiveServer, forced: str) -> None:
    """Several tokens are committed at once, whole and streamed."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}}}
    given = {"tools": TOOLS, "tool_choice": "required"} if forced == "call" else form
    for seed in range(examples(3, least=1)):
        body = {"messages": BODY["messages"], "seed": seed, "max_completion_tokens": 300, **given}
        (whole,) = harmony.post("/v1/chat/completions", **body)["choices"]
        (plain,) = harmony.post("/v1/chat/completions", **body, speculation=False)["choices"]
        calls = [each["function"] for each in whole["message"].get("tool_calls", ())]
        assert calls == [each["function"] for each in plain["message"].get("tool_calls", ())]
        names = ("content", "reasoning_content")
        assert [whole["message"].get(name) for name in names] == [plain["message"].get(name) for name in names]
        deltas = [each["delta"] for c in harmony.chunks("/v1/chat/completions", **body) for each in c["choices"]]
        for name in names:
            assert "".join(each.get(name) or "" for each in deltas) == (whole["message"].get(name) or "")
        assert "<|" not in str(whole["message"])
        if whole["finish_reason"] != "length":
            text = calls[0]["arguments"] if forced == "call" else whole["message"]["content"]
            assert json.loads(text)["size"] in (1, 2)


def test_tools_that_the_model_may_call_need_a_format(without_tools: LiveServer) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        refused = without_tools.http.post("/v1/chat/completions", json={**BODY, **choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
        assert "--tool-parser" in refused.json()["error"]["message"]
    without_tools.post("/v1/chat/completions", **{**BODY, "tool_choice": "none", "max_completion_tokens": 2})


def test_a_response_format_is_compact_unless_blanks_are_asked(server: LiveServer) -> None:
    """Otherwise a boolean may end in 60 tokens of blanks."""
    space = {str(ALPHABET.index("Ġ")): 100}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    body = {"messages": BODY["messages"], "max_completion_tokens": 40, "temperature": 0, "logit_bias": space}
    text = server.post("/v1/chat/completions", **body, response_format=form)["choices"][0]["message"]["content"]
    assert text in ('{"a":true}', '{"a":false}')
    blanks = {"disable_any_whitespace": False}
    asked = server.post("/v1/chat/completions", **body, response_format=form, structured_outputs=blanks)
    assert asked["choices"][0]["message"]["content"].count(" ") > 30
    for wrong in ({"disable_any_whitespace": 1}, {**blanks, "regex": "a"}):
        refused = server.http.post(
            "/v1/chat/completions", json={**body, "response_format": form, "structured_outputs": wrong}
        )
        assert refused.status_code == 400


@pytest.mark.parametrize(("include", "content"), [(False, ""), (True, "<end>")])
def test_an_end_token_is_not_in_the_text_of_a_chat_with_tools(server: LiveServer, include: bool, content: str) -> None:
    """For whole and streamed answers: tool parsers read the same text, and the token still counts."""
    ending = BODY | {"logit_bias": {str(END): 100}, "skip_special_tokens": False, "include_stop_str_in_output": include}
    answer = server.post("/v1/chat/completions", **ending)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    assert (choice["stop_reason"], answer["usage"]["completion_tokens"]) == (None, 1)
    chunks = server.chunks("/v1/chat/completions", **ending)
    deltas = [each["delta"].get("content") or "" for chunk in chunks for each in chunk["choices"]]
    assert "".join(deltas) == content
