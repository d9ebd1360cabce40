"""A request for a response as a chat, from which its settings, its prompt and its answer come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from speculant.serving.errors import ApiError, refusal
from speculant.serving.protocol import ChatBody, GeneratingBody, ResponseBody
from speculant.serving.tool_use import with_allowed_tools
from speculant.serving.tools.schema import CUSTOM, CUSTOM_FIX

_OF_FUNCTION = ("name", "description", "parameters", "strict")
_OF_FORMAT = ("type", "name", "description", "schema", "strict")
_CHOICES = ("none", "auto", "required")
_MOST_VALUES = 20_000  # of a field that each response repeats
_MOST_METADATA = (16, 64, 512)  # entries, characters of a name and of a text: OpenAI's limits
_SAME = GeneratingBody.model_fields.keys() | {"parallel_tool_calls", "chat_template_kwargs"}
LOGPROBS = "message.output_text.logprobs"  # a response has log-probabilities if its `include` has this
_OF_NOTHING = frozenset(  # values of `include` about items that no response here has, and reasoning is not encrypted
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)


class ResponseChat(ChatBody):
    """A response's request as a chat. The form of its text has no effect on a required call."""

    call_replaces_form: ClassVar[bool] = True


def as_chat(body: ResponseBody) -> ChatBody:
    """Return a response's request as a chat without messages yet.

    Raises ApiError (400) for hosted tools, and for fields that would have no effect.
    """
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise refusal("reasoning.effort is not text.", "reasoning")
    for name in ("tools", "tool_choice", "text"):
        _check_values(name, getattr(body, name))
    tools = None if body.tools is None else [_chat_tool(tool) for tool in body.tools]
    choice = _chat_choice(body.tool_choice)
    _check(body)
    logprobs = LOGPROBS in (body.include or ())
    own = {
        "messages": [],
        "tools": tools,
        "tool_choice": choice,
        "response_format": _chat_form(body),
        "reasoning_effort": effort,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
    }
    return with_allowed_tools(ResponseChat.model_construct(**{name: getattr(body, name) for name in _SAME} | own))


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


def _check(body: ResponseBody) -> None:
    """Raise ApiError (400) for fields of OpenAI's Responses that would have no effect here."""
    included = set(body.include or ())
    reasoning = _set_keys(body.reasoning, {"summary": "auto"})  # there are none, and none are required
    text = _set_keys(body.text, {"verbosity": "medium"})
    asked = f'include=["{LOGPROBS}"]'
    refused = {
        "n": (body.n not in (None, 1), "a response has one answer; leave it out"),
        "include": (bool(included - {LOGPROBS} - _OF_NOTHING), f"this server supports only {asked}"),
        "top_logprobs": (bool(body.top_logprobs) and LOGPROBS not in included, f"it needs {asked}"),
        "reasoning": (bool(reasoning - {"effort"}), "only effort is supported; reasoning is not summarised"),
        "text": (bool(text - {"format"}), "only format is supported"),
        "truncation": (
            body.truncation not in (None, "disabled", "auto"),
            'use "disabled"; a conversation is never cut',
        ),
        "response_format": (body.response_format is not None and "format" in text, "text.format is given too"),
    }
    for name, (wrong, instead) in refused.items():
        if wrong:
            raise refusal(f"{name} is not supported here: {instead}.", name, "unsupported_parameter")
    given, (entries, name_length, text_length) = body.metadata or {}, _MOST_METADATA
    if len(given) > entries or any(len(name) > name_length or len(text) > text_length for name, text in given.items()):
        limits = f"{entries} entries, with names of {name_length} characters and texts of {text_length}"
        raise refusal(f"metadata may have at most {limits}.", "metadata")
    if body.prompt_logprobs is not None:
        raise refusal("A response has no prompt_logprobs: use /v1/chat/completions.", "prompt_logprobs")
    if body.stream_options is not None and body.stream_options.continuous_usage_stats:
        raise refusal("A response has its usage in the last event only.", "stream_options")


def _set_keys(value: Mapping[str, Any] | None, usual: Mapping[str, str]) -> set[str]:
    """Return the keys whose values are neither null nor the usual ones."""
    return {key for key, each in (value or {}).items() if each is not None and each != usual.get(key)}


def _chat_form(body: ResponseBody) -> dict[str, Any] | None:
    form = (body.text or {}).get("format")
    if form is None:
        return body.response_format
    if not isinstance(form, Mapping):
        raise refusal("text.format is not an object.", "text")
    return None if form.get("type", "text") == "text" else {"type": form.get("type"), "json_schema": form}


def _check_values(name: str, given: Any) -> None:
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
