"""The settings of a response in the form of a chat, whose prompt and answer are made and read in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.serving.errors import ApiError, refusal
from speculant.serving.protocol import ChatBody, ResponseBody
from speculant.serving.tool_use import with_allowed_tools

_OF_FUNCTION = ("name", "description", "parameters", "strict")
_CHOICES = ("none", "auto", "required")


def as_chat(body: ResponseBody) -> ChatBody:
    """Return a chat with a response's settings, and without messages yet. Raises ApiError (400) for hosted tools."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise refusal("reasoning.effort is not text.", "reasoning")
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
    return refusal(
        f"A tool of type {str(kind)[:80]!r} is not supported, as this server runs no tools: use type function.",
        param,
        "unsupported_value",
    )
