"""Items of a response's input are checked, listed in OpenAI's form, and become the messages of a chat."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.serving.errors import ApiError
from speculant.serving.openai.items import as_chat, as_messages, read_items, shown_settings
from speculant.serving.openai.protocol import ResponseBody

CALL = {"type": "function_call", "call_id": "c1", "name": "cut", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "yes", "annotations": []}]}
USER = {"role": "user", "content": "hi"}


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    made = as_messages(instructions, read_items(list(items), {}))
    return [message.model_dump(exclude_none=True) for message in made]


def test_a_text_is_a_user_s_message() -> None:
    (item,) = read_items("hi", {})
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }


def test_a_message_has_the_same_text_in_each_form() -> None:
    parts = [{"type": "input_text", "text": "h"}, {"type": "text", "text": "i"}]
    for given in (USER, {"type": "message", "role": "user", "content": parts}, {**USER, "id": "msg_1", "status": None}):
        assert messages(given) == [{"role": "user", "content": "hi"}]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert messages(refused) == [{"role": "assistant", "content": "no"}]


def test_reasoning_text_and_calls_are_one_message() -> None:
    more = {**CALL, "call_id": "c2", "name": "sew"}
    made = messages(USER, REASONING, ANSWER, CALL, more, OUTPUT, {**OUTPUT, "call_id": "c2"}, instructions="be brief")
    calls = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": '{"a":1}'}}
        for name, function in (("c1", "cut"), ("c2", "sew"))
    ]
    assert made == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "tool", "content": "done", "tool_call_id": "c2"},
    ]


def test_what_follows_an_answer_begins_a_message() -> None:
    assert messages(ANSWER, ANSWER) == [{"role": "assistant", "content": "yes"}] * 2
    assert [message["content"] for message in messages(ANSWER, REASONING, ANSWER)] == ["yes", "yes"]
    assert messages(CALL, ANSWER)[1] == {"role": "assistant", "content": "yes"}
    assert messages(REASONING) == [{"role": "assistant", "content": "", "reasoning_content": "hm"}]


def test_a_reference_is_the_stored_item() -> None:
    stored = read_items([{**USER, "id": "msg_1"}], {})[0]
    for given in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"id": "msg_1", "type": None}):
        assert read_items([given], {"msg_1": stored}) == [stored]


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ({}, "no id"),
        ({"role": "user"}, "no content"),
        ({"role": 1, "content": "a"}, "no role"),
        ({"content": "a"}, "no role"),
        ({"role": "user", "content": ["a"]}, "type 'str'"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "type 'input_image'"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "type 'refusal'"),
        ({"role": "user", "content": [{"type": "input_text", "text": 1}]}, "no text"),
        ({**USER, "id": 5}, "an id"),
        ({**USER, "id": "x" * 500}, "an id"),
        ({**USER, "status": "gone"}, "a status"),
        ({"type": 5}, "type that is not text"),
        ({"type": "computer_call"}, "type 'computer_call'"),
        ({"type": "reasoning"}, "neither summary nor content"),
        ({"type": "reasoning", "summary": "x"}, "another type than summary_text"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}, "encrypted_content"),
        ({**CALL, "arguments": {}}, "no arguments"),
        ({**CALL, "call_id": None}, "no call_id"),
        ({**OUTPUT, "output": 5}, "no output"),
        ({**OUTPUT, "output": [{"type": "input_file"}]}, "type 'input_file'"),
    ],
)
def test_other_items_are_refused_by_name(item: dict[str, Any], reason: str) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        read_items([item], {})
    assert (caught.value.status, caught.value.param) == (400, "input")


def test_an_output_needs_its_call() -> None:
    for given in ((OUTPUT,), (OUTPUT, CALL), (CALL, {**OUTPUT, "call_id": "c2"}), (USER, {**OUTPUT, "call_id": ""})):
        with pytest.raises(ApiError, match="precedes its output"):
            messages(*given)


def test_tools_have_a_chat_s_form() -> None:
    tool = {"type": "function", "name": "cut", "parameters": {"type": "object"}, "strict": True, "description": None}
    choice = {"type": "function", "name": "cut"}
    chat = as_chat(ResponseBody(input="x", tools=[tool], tool_choice=choice, parallel_tool_calls=False))
    function = {"name": "cut", "parameters": {"type": "object"}, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "cut"}}
    assert chat.parallel_tool_calls is False
    others = [{**tool, "name": name} for name in ("cut", "sew", "glue")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice, {"type": "function", "name": "glue"}]}
    chat = as_chat(ResponseBody(input="x", tools=others, tool_choice=allowed))
    assert [each["function"]["name"] for each in chat.tools or ()] == ["cut", "glue"]
    assert chat.tool_choice == "required"


@pytest.mark.parametrize("kind", ["web_search", "file_search", "mcp", "custom", "code_interpreter", None])
def test_hosted_tools_are_refused_by_name(kind: str | None) -> None:
    own = [{"type": "function", "name": "f"}]
    for given, param in (
        ({"tools": [{"type": kind}]}, "tools"),
        ({"tools": own, "tool_choice": {"type": kind}}, "tool_choice"),
        ({"tools": own, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}},
         "tool_choice"),
    ):  # fmt: skip
        reason = "takes free text" if kind == "custom" else "is not supported"
        with pytest.raises(ApiError, match=f"type {str(kind)!r} {reason}") as caught:
            as_chat(ResponseBody(input="x", **given))
        assert (caught.value.status, caught.value.param) == (400, param)


def test_a_response_repeats_only_settings_that_were_read() -> None:
    tool = {"type": "function", "name": "f", "notes": [1], "parameters": {"type": "object"}}
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "f", "notes": 1}],
        "x": 1,
    }
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "notes": 1}
    shown = shown_settings(ResponseBody(input="x", tools=[tool], tool_choice=allowed, text={"format": form}))
    assert shown == {
        "tools": [
            {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": None}
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    }
    named = {"type": "function", "name": "f", "mode": "auto"}
    shown = shown_settings(ResponseBody(input="x", tool_choice=named, text={"format": {"type": "text", "x": 1}}))
    assert shown == {
        "tools": [],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "text"}},
    }
    plain = shown_settings(ResponseBody(input="x"))
    assert plain == {"tools": [], "tool_choice": "auto", "text": {"format": {"type": "text"}}}


def test_a_choice_by_an_unknown_word_is_refused() -> None:
    with pytest.raises(ApiError, match="none, auto, required"):
        as_chat(ResponseBody(input="x", tool_choice="sometimes"))
