"""Tools of a chat: what the model's template and format make of them, and what a `tool_choice` insists on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from speculant.params import SamplingParams
from speculant.serving.errors import refusal
from speculant.serving.messages import MessageReader
from speculant.serving.protocol import ChatBody
from speculant.serving.reasoning import find_reasoning
from speculant.serving.tools import call_grammar, call_schema, find_format, find_parser
from speculant.text.tokenizer import Tokenizer

MOST_TOOLS = 128  # OpenAI's limit


def with_tools(tokenizer: Tokenizer, params: SamplingParams, body: ChatBody, name: str | None) -> SamplingParams:
    """Return settings under which calls can be read, and are made if the request insists on one.

    name: the format of calls; None = the one that the template is written for. Raises RequestError for tools or a
    choice that make no sense.
    """
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise refusal("tool_choice came without tools.", "tool_choice")
        return params
    if len(body.tools) > MOST_TOOLS:
        raise refusal(f"There are {len(body.tools)} tools and {MOST_TOOLS} may be.", "tools")
    template = tokenizer.template_for(tools=True)
    found = find_format(template, name)
    special = tokenizer.special_ids
    if found is not None and any(tokenizer.backend.token_to_id(marker) in special for marker in found.markers()):
        params = dataclasses.replace(params, skip_special_tokens=False)
    if body.tool_choice in (None, "auto"):
        call_schema(body.tools, "required", template, name)  # checks them
        return params
    if params.structured_outputs is not None:
        raise refusal("tool_choice and the form of the answer are both given: keep one.", "tool_choice")
    shapes = call_schema(body.tools, body.tool_choice or "required", template, name)
    several = found is not None and body.tool_choice == "required" and body.parallel_tool_calls is not False
    separator = found.separator(template) if found is not None and several else None
    grammar = call_grammar(shapes, lambda text: _special_id(tokenizer, text), separator)
    return dataclasses.replace(params, structured_outputs={"grammar": grammar})  # type: ignore[arg-type]


def reader_for(tokenizer: Tokenizer, body: ChatBody, name: str | None) -> Callable[[str], MessageReader]:
    """Return what makes the reader of an answer, from the prompt's text."""
    calls = bool(body.tools) and body.tool_choice != "none"
    template = tokenizer.template_for(calls)

    def make(prompt: str) -> MessageReader:
        tools = find_parser(template, name) if calls else None
        return MessageReader(find_reasoning(template, prompt), tools)

    return make


def _special_id(tokenizer: Tokenizer, text: str) -> int | None:
    token: int | None = tokenizer.backend.token_to_id(text)
    return token if token in tokenizer.special_ids else None
