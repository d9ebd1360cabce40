"""Tools of a chat: the format that the model's template defines for calls, and calls that a `tool_choice` requires."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from speculant import plugins
from speculant.params import SamplingParams
from speculant.serving.errors import refusal
from speculant.serving.messages import MessageReader
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ChatBody
from speculant.serving.reasoning import find_reasoning, with_tags
from speculant.serving.sampling import requires_call, wants_compact
from speculant.serving.tools import ToolParser, call_grammar, call_schema, find_format
from speculant.text.tokenizer import Tokenizer

MOST_TOOLS = 128  # OpenAI's limit
_UNKNOWN = "json"  # the format of required calls if the model's own is unknown


def with_tools(tokenizer: Tokenizer, params: SamplingParams, body: ChatBody, name: str | None) -> SamplingParams:
    """Return settings under which calls can be read, and must be made if the request requires one.

    name: the format of calls; None = the template's. Raises RequestError for invalid tools or an invalid choice.
    """
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise refusal("tool_choice needs tools.", "tool_choice")
        return params
    if len(body.tools) > MOST_TOOLS:
        raise refusal(f"There are {len(body.tools)} tools and at most {MOST_TOOLS} are allowed.", "tools")
    template, found = tokenizer.template_for(tools=True), _format_of(tokenizer, body, name)
    params = with_tags(tokenizer, params, found.markers())
    if not requires_call(body):
        call_schema(body.tools, "required", template, name)  # checks them
        return params
    if params.structured_outputs is not None:
        raise refusal("tool_choice and the form of the answer are both given: keep one.", "tool_choice")
    shapes = call_schema(body.tools, body.tool_choice or "required", template, name)
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    separator = found.separator(template) if several else None
    grammar = call_grammar(shapes, lambda text: _added_id(tokenizer, text), separator, wants_compact(body))
    return dataclasses.replace(params, structured_outputs={"grammar": grammar})  # type: ignore[arg-type]


def reader_for(
    tokenizer: Tokenizer, body: ChatBody, name: str | None, has_form: bool
) -> Callable[[Prompt], MessageReader]:
    """Return a function that makes the reader of an answer from its prompt. has_form: the answer has a given form."""
    calls = bool(body.tools) and body.tool_choice != "none"

    def make(prompt: Prompt) -> MessageReader:
        tools = _format_of(tokenizer, body, name)() if calls else None
        return MessageReader(find_reasoning(prompt.rendered, has_form), tools, requires_call(body))

    return make


def finish_reason_of_calls(body: ChatBody) -> str:
    """Return the finish_reason of an answer that ends with calls: as in OpenAI, "stop" if one function was named."""
    return "tool_calls" if body.tool_choice in (None, "auto", "required") else "stop"


def _format_of(tokenizer: Tokenizer, body: ChatBody, name: str | None) -> type[ToolParser]:
    """Return the format in which calls are read, and written if the request requires one.

    Raises ApiError (400) if the model decides whether it makes calls, and its format is unknown.
    """
    found = find_format(tokenizer.template_for(tools=True), name)
    if found is None and requires_call(body):
        found = find_format(None, _UNKNOWN)
    if found is None:
        known = ", ".join(plugins.names("speculant.serving.tools"))
        raise refusal(
            "The format of this model's tool calls is unknown, so they can't be separated from text. "
            f'Start the server with --tool-parser ({known}), or send tool_choice="required" or a named function.',
            "tool_choice",
        )
    return found


def _added_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is one added token, special or not."""
    token: int | None = tokenizer.backend.token_to_id(text)
    return token if token in tokenizer.backend.get_added_tokens_decoder() else None
