"""Items of a conversation: read from the input of a request, and turned into the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from speculant.serving.answers import new_id
from speculant.serving.errors import ApiError, refusal
from speculant.serving.protocol import FunctionCall, Message, ToolCall

Item = dict[str, Any]
REFERENCE = "item_reference"
MESSAGE_ID, REASONING_ID, CALL_ID = "msg_", "rs_", "fc_"  # begin the ids of items
_LONGEST_ID = 128
_STATES = ("in_progress", "completed", "incomplete")


def kind_of(item: Mapping[str, Any]) -> str:
    """Return the type of an item, which messages and references may leave out. Raises ApiError (400)."""
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item or "content" in item else REFERENCE
    if not isinstance(kind, str):
        raise _wrong("An item of input has a type that is not text.")
    return kind


def reference_of(item: Mapping[str, Any]) -> str:
    """Return the id to which an item refers. Raises ApiError (400) if it has none."""
    return _text(item, "id", "An item of input")


def read_items(given: str | Sequence[Item], stored: Mapping[str, Item]) -> list[Item]:
    """Return the items of a request's input in the form in which they are listed, with ids.

    stored: the items that references name, by id. Raises ApiError (400) for items that are not supported.
    """
    if isinstance(given, str):
        return [_read_message({"role": "user", "content": given})]
    return [stored[reference_of(item)] if kind_of(item) == REFERENCE else _read(item) for item in given]


def _read(item: Item) -> Item:
    kind = kind_of(item)
    reader = _READERS.get(kind)
    if reader is None:
        known = ", ".join((*_READERS, REFERENCE))
        raise _wrong(f"An item of input has the type {kind[:80]!r}, which is not supported: use {known}.")
    return reader(item)


def _read_message(item: Item) -> Item:
    role, content = _text(item, "role", "A message of input"), item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _wrong("A message of input has no content: give a text, or a list of parts.")
    return {
        "id": _id(item, MESSAGE_ID),
        "type": "message",
        "status": _status(item),
        "role": role,
        "content": [_read_part(part, role == "assistant") for part in content],
    }


def _read_part(part: object, is_answer: bool) -> Item:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "refusal" and is_answer:
        return {"type": "refusal", "refusal": _text(part, "refusal", "A part of a message")}
    if not isinstance(part, Mapping) or kind not in ("input_text", "output_text", "text"):
        raise _wrong(
            f"A part of a message has the type {str(kind)[:80]!r}: this server reads only text (input_text, or in an"
            " assistant's message output_text and refusal)."
        )
    text = _text(part, "text", "A part of a message")
    if not is_answer:
        return {"type": "input_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _read_call(item: Item) -> Item:
    texts = {name: _text(item, name, "A function_call of input") for name in ("call_id", "name", "arguments")}
    return {"id": _id(item, CALL_ID), "type": "function_call", "status": _status(item), **texts}


def _read_output(item: Item) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [_read_part(part, is_answer=False) for part in output]
    elif not isinstance(output, str):
        raise _wrong("A function_call_output of input has no output: give a text, or a list of parts.")
    return {
        "id": _id(item, "fco_"),
        "type": "function_call_output",
        "status": _status(item),
        "call_id": _text(item, "call_id", "A function_call_output of input"),
        "output": output,
    }


def _read_reasoning(item: Item) -> Item:
    if item.get("encrypted_content") is not None:
        raise _wrong("encrypted_content of a reasoning item can't be read here: send its content, or leave it out.")
    summary, content = item.get("summary"), item.get("content")
    if summary is None and content is None:
        raise _wrong("A reasoning item of input has neither summary nor content.")
    return {
        "id": _id(item, REASONING_ID),
        "type": "reasoning",
        "status": _status(item),
        "summary": _typed(summary, "summary_text"),
        "content": _typed(content, "reasoning_text"),
    }


def _typed(parts: object, kind: str) -> list[Item]:
    """Return parts that all have one type."""
    parts = [] if parts is None else parts
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) and part.get("type") == kind for part in parts):
        raise _wrong(f"A reasoning item of input has parts of another type than {kind}.")
    return [{"type": kind, "text": _text(part, "text", "A reasoning item of input")} for part in parts]


_READERS: Mapping[str, Callable[[Item], Item]] = MappingProxyType(
    {
        "message": _read_message,
        "function_call": _read_call,
        "function_call_output": _read_output,
        "reasoning": _read_reasoning,
    }
)


def _wrong(message: str) -> ApiError:
    return refusal(message, "input")


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where} has no {name} that is text.")
    return value


def _id(item: Item, prefix: str) -> str:
    given = item.get("id")
    if given is None:
        return new_id(prefix)
    if not isinstance(given, str) or not given or len(given) > _LONGEST_ID:
        raise _wrong(f"An item of input has an id that is not a text of 1 to {_LONGEST_ID} characters.")
    return given


def _status(item: Item) -> str:
    given = item.get("status")
    if given is not None and given not in _STATES:
        raise _wrong(f"An item of input has a status other than {', '.join(_STATES)}.")
    return given or "completed"


def as_messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """Return the messages of a conversation. Reasoning, text and calls that follow each other are one message.

    Raises ApiError (400) for an output whose call does not precede it.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    calls = set[str]()
    for item in items:
        if item["type"] == "function_call_output":
            if item["call_id"] not in calls:
                raise _wrong(f"No function_call with call_id {item['call_id'][:80]!r} precedes its output.")
            messages.append(Message(role="tool", tool_call_id=item["call_id"], content=_joined(item["output"])))
        elif item["type"] == "message" and item["role"] != "assistant":
            messages.append(Message(role=item["role"], content=_joined(item["content"])))
        else:
            _add(_assistant(messages, item["type"]), item)
            if item["type"] == "function_call":
                calls.add(item["call_id"])
    for message in messages:
        if message.content is None and not message.tool_calls:
            message.content = ""
    return messages


def _assistant(messages: list[Message], kind: str) -> Message:
    """Return the assistant's message to which an item belongs: the last message, or a new one."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        begun = last.content is not None or last.tool_calls
        if kind == "function_call" or not begun:
            return last
    messages.append(Message(role="assistant"))
    return messages[-1]


def _add(message: Message, item: Item) -> None:
    if item["type"] == "message":
        message.content = _joined(item["content"])
    elif item["type"] == "reasoning":
        message.reasoning_content = (message.reasoning_content or "") + _joined(item["content"])
    else:
        function = FunctionCall(name=item["name"], arguments=item["arguments"])
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(ToolCall(id=item["call_id"], function=function))


def _joined(parts: str | Sequence[Item]) -> str:
    if isinstance(parts, str):
        return parts
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)
