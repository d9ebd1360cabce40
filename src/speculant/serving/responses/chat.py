"""The settings of a response in the form of a chat, whose prompt and answer are made and read in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.serving.errors import ApiError, refusal
from speculant.serving.protocol import ChatBody, ResponseBody
from speculant.serving.tool_use import with_allowed_tools
from speculant.serving.tools.schema import CUSTOM, CUSTOM_FIX

_OF_FUNCTION = ("name", "description", "parameters", "strict")
_OF_FORMAT = ("type", "name", "description", "schema", "strict")
_CHOICES = ("none", "auto", "required")
_MOST_VALUES = 20_000  # of a field that each response repeats


def as_chat(body: ResponseBody) -> ChatBody:
    """Return a chat with a response's settings, and without messages yet. Raises ApiError (400) for hosted tools."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise refusal("reasoning.effort is not text.", "reasoning")
    for name in ("tools", "tool_choice", "text"):
        _check_size(name, getattr(body, name))
    chat = ChatBody.model_construct(
        messages=[],
        tools=None if body.tools is None else [_chat_tool(tool) for tool in body.tools],
        tool_choice=_chat_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        structured_outputs=body.structured_outputs,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=effort,
    )
    return with_allowed_tools(chat)


def shown_settings(body: ResponseBody) -> dict[str, Any]:
    """Return the settings of a response that its document repeats: tools, their choice and the format of the text.

    Only what this server has read of them. The body must have passed `as_chat`.
    """
    form, choice = (body.text or {}).get("format"), body.tool_choice
    form = {name: form[name] for name in _OF_FORMAT if name in form} if isinstance(form, Mapping) else {}
    if isinstance(choice, Mapping):
        is_list = choice["type"] == "allowed_tools"
        listed = {"mode": choice["mode"], "tools": list(map(_shown_name, choice["tools"]))} if is_list else {}
        choice = {**_shown_name(choice), **listed}
    return {
        "text": {"format": {"type": "text"} if form.get("type", "text") == "text" else form},
        "tool_choice": "auto" if choice is None else choice,
        "tools": [{"type": "function", **{name: tool.get(name) for name in _OF_FUNCTION}} for tool in body.tools or ()],
    }


def _shown_name(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {name: choice[name] for name in ("type", "name") if name in choice}


def _check_size(name: str, given: Any) -> None:
    """Raise ApiError (400) if a field has too many values. Long texts take less time than many values."""
    left = [given]
    for _ in range(_MOST_VALUES):
        if not left:
            return
        value = left.pop()
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if left:
        raise refusal(f"{name} has over {_MOST_VALUES} values: make its schemas smaller.", name)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _hosted(tool, "tools")
    return {"type": "function", "function": {name: tool[name] for name in _OF_FUNCTION if tool.get(name) is not None}}


def _chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _CHOICES:
            raise refusal(f"tool_choice is neither one of {', '.join(_CHOICES)} nor an object.", "tool_choice")
        return choice
    if choice.get("type") == "allowed_tools":
        listed = choice.get("tools")
        names = [_named(each) for each in listed] if isinstance(listed, list) else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": names}}
    return _named(choice)


def _named(choice: object) -> dict[str, Any]:
    if not isinstance(choice, Mapping) or choice.get("type") != "function":
        raise _hosted(choice, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _hosted(tool: object, param: str) -> ApiError:
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind == "custom":
        return refusal(f"{CUSTOM[0].upper()}{CUSTOM[1:]}. Fix: {CUSTOM_FIX}", param, "unsupported_value")
    return refusal(
        f"A tool of type {str(kind)[:80]!r} is not supported, as this server runs no tools: use type function.",
        param,
        "unsupported_value",
    )
