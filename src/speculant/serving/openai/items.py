"""A request for a response as a chat: its settings, and the items of its conversation as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from speculant.serving.errors import ApiError, refusal
from speculant.serving.openai.answers import new_id
from speculant.serving.openai.protocol import ChatBody, FunctionCall, GeneratingBody, Message, ResponseBody, ToolCall
from speculant.serving.openai.settings import with_allowed_tools
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
        names = [_named_function(each) for each in listed] if isinstance(listed, list) else None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": names}}
    return _named_function(choice)


def _named_function(choice: object) -> dict[str, Any]:
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
