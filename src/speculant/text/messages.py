"""Conversations: turns messages in OpenAI's form into the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from speculant.errors import RequestError, suggest

ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation for a chat template: contents become text, and the arguments of calls objects.

    A message is a mapping with a `role` and a `content`: a text, or a list of parts `{"type": "text", "text": ...}`. An
    assistant's message with `tool_calls` needs no content. Raises RequestError with the number of the wrong message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"a conversation is a {type(messages).__name__}", 'give a list of messages such as {"role": "user", ...}.'
        )
    if not messages:
        raise RequestError("the conversation has no messages", 'give at least {"role": "user", "content": "..."}.')
    return [_read(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def check_variables(given: object) -> Mapping[str, Any]:
    """Return the caller's variables for a template. Raises RequestError for a variable that has its own parameter."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"chat_template_kwargs is {str(given)[:80]}", "map the template's variables to values.")
    if reserved := sorted(_RESERVED & set(given)):
        raise RequestError(f"chat_template_kwargs can't set {reserved[0]}", f"use the parameter {reserved[0]}.")
    return given


def _read(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(where, f"is a {type(message).__name__}", 'write it as {"role": "user", "content": "..."}.')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        fix = suggest(role, ROLES) if isinstance(role, str) else f"give it one of the roles {', '.join(ROLES)}."
        _refuse(where, f"has the role {role!r}" if role is not None else "has no role", fix)
    calls = message.get("tool_calls")
    value = {name: each for name, each in message.items() if each is not None}
    value["role"] = "system" if role == "developer" else role  # OpenAI's other name, unknown to templates
    value["content"] = _text(message.get("content"), where, optional=bool(calls))
    if calls:
        value["tool_calls"] = _calls(calls, where)
    return value


def _text(content: object, where: str, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list | tuple):
        problem = "has no content" if content is None else f"has a content that is a {type(content).__name__}"
        _refuse(where, problem, "give it a text, or a list of text parts.")
    return "".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        _refuse(where, f"has a part of type {kind!r} without text", 'use only {"type": "text", "text": "..."}.')
    return text


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    functions = [_function(call) for call in calls] if isinstance(calls, list | tuple) else [None]
    if any(function is None for function in functions):
        fix = 'write each as {"type": "function", "function": {"name": ..., "arguments": ...}}.'
        _refuse(where, "has tool_calls that are not calls", fix)
    assert isinstance(calls, list | tuple)
    return [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]


def _function(call: object) -> dict[str, Any] | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    return {**function, "arguments": _arguments(function.get("arguments", {}))}


def _arguments(given: Any) -> Any:
    """Return arguments as an object, which templates expect. Text that is not a JSON object stays unchanged."""
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _refuse(where: str, problem: str, fix: str) -> NoReturn:
    raise RequestError(f"{where} {problem}", fix)
