"""Conversations: turns messages in OpenAI's form into the form that chat templates read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from speculant.errors import RequestError, suggest
from speculant.files import parse_json

ROLES = ("system", "developer", "user", "assistant", "tool")
_CUSTOM_ROLE = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)
_NOT_CONTINUED = "leave out continue_final_message."
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


def read_messages(messages: object, template: str | None = None) -> list[dict[str, Any]]:
    """Return a conversation for a chat template: contents become text, and the arguments of calls objects.

    A message is a mapping with a `role` and a `content`: a text, or a list of parts `{"type": "text", "text": ...}`. An
    assistant's message may have a `refusal` in place of a content, or parts of this type; with `tool_calls` it needs
    neither. template: its source; `developer` becomes `system` unless the template has this role. Other roles than
    ROLES are passed on, see `check_roles`. Raises RequestError with the number of the wrong message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f"a conversation is a {type(messages).__name__}", 'give a list of messages such as {"role": "user", ...}.'
        )
    if not messages:
        raise RequestError("the conversation has no messages", 'give at least {"role": "user", "content": "..."}.')
    has_developer = template is not None and _names("developer", template)
    return [_read(message, f"message {number}", has_developer) for number, message in enumerate(messages, start=1)]


def check_roles(conversation: Sequence[Mapping[str, Any]], template: str, text: str) -> None:
    """Raise RequestError if a template leaves out the content of a message whose role it does not know.

    conversation: as `read_messages` returns it. text: the prompt that the template made of it.
    """
    place = 0
    for number, message in enumerate(conversation, start=1):
        role, content = message["role"], message["content"].strip()
        if role in ROLES or _names(role, template):
            continue
        place = text.find(content, place)
        if place < 0:
            problem = f"has the role {role!r}, whose messages the chat template leaves out"
            _refuse(f"message {number}", problem, suggest(role, ROLES))


def with_mark(conversation: Sequence[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Return a conversation whose last content ends with a mark, for `up_to_mark`; a space shows whether it is trimmed.

    mark: a text that occurs nowhere else. Raises RequestError for a last message that has calls in place of a content.
    """
    *before, last = conversation
    if last.get("tool_calls") and not last["content"]:
        raise RequestError("the last message can't be continued: it has no content", _NOT_CONTINUED)
    return [*before, {**last, "content": f"{last['content']}{mark} "}]


def up_to_mark(text: str, mark: str, content: str) -> str:
    """Return a rendered conversation up to the mark after its last content.

    White space at the end of the content is kept, unless the template trims contents. Raises RequestError if the
    template does not write the content as it is.
    """
    before, _, after = text.rpartition(mark)
    if mark not in text or not before.rstrip().endswith(content.strip()):
        raise RequestError("the last message can't be continued: the chat template changes its content", _NOT_CONTINUED)
    before = before.replace(f"{mark} ", "").replace(mark, "")  # a template may write a content twice
    return before if after.startswith(" ") else before.rstrip()


def _names(role: str, template: str) -> bool:
    """Whether a template compares something with the name of a role."""
    return f"'{role}'" in template or f'"{role}"' in template


def check_variables(given: object) -> Mapping[str, Any]:
    """Return the caller's variables for a template. Raises RequestError for a variable that has its own parameter."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"chat_template_kwargs is {str(given)[:80]}", "map the template's variables to values.")
    if reserved := sorted(_RESERVED & set(given)):
        raise RequestError(f"chat_template_kwargs can't set {reserved[0]}", f"use the parameter {reserved[0]}.")
    return given


def _read(message: object, where: str, has_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(where, f"is a {type(message).__name__}", 'write it as {"role": "user", "content": "..."}.')
    role = message.get("role")
    if not isinstance(role, str) or not _CUSTOM_ROLE.fullmatch(role):
        fix = suggest(role[:80], ROLES) if isinstance(role, str) else f"give it one of the roles {', '.join(ROLES)}."
        _refuse(where, f"has the role {str(role)[:80]!r}" if role is not None else "has no role", fix)
    calls, refused = message.get("tool_calls"), message.get("refusal")
    value = {name: each for name, each in message.items() if each is not None and name != "refusal"}
    value["role"] = "system" if role == "developer" and not has_developer else role
    content = message.get("content")
    if not content and isinstance(refused, str) and role == "assistant":
        content = refused
    value["content"] = _text(content, where, bool(calls), ("text", "refusal") if role == "assistant" else ("text",))
    if calls:
        value["tool_calls"] = _calls(calls, where)
    return value


def _text(content: object, where: str, optional: bool, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list | tuple):
        problem = "has no content" if content is None else f"has a content that is a {type(content).__name__}"
        _refuse(where, problem, "give it a text, or a list of text parts.")
    return "".join(_part(part, where, kinds) for part in content)


def _part(part: object, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a part, which is under the name of the part's type."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kind) if isinstance(part, Mapping) and kind in kinds else None
    if not isinstance(text, str):
        problem = f"has a part of type {str(kind)[:80]!r} without text"
        _refuse(where, problem, 'use only {"type": "text", "text": "..."}.')
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
        value = parse_json(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _refuse(where: str, problem: str, fix: str) -> NoReturn:
    raise RequestError(f"{where} {problem}", fix)
