"""Tools of a chat: the format that the model's template defines for calls, and calls that a `tool_choice` requires."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from speculant import plugins
from speculant.params import SamplingParams
from speculant.serving.errors import refusal
from speculant.serving.messages import MessageReader
from speculant.serving.prompts import Prompt
from speculant.serving.protocol import ChatBody, ConversationBody
from speculant.serving.reasoning import find_reasoning, with_tags
from speculant.serving.sampling import requires_call, wants_compact
from speculant.serving.tools import (
    TokenId,
    ToolParser,
    call_grammar,
    call_schema,
    choose_tools,
    find_format,
    form_symbol,
    read_tools,
)
from speculant.structured.spec import StructuredOutputs
from speculant.text.chat import TAGS, find_tags
from speculant.text.tokenizer import Tokenizer

C = TypeVar("C", bound=ConversationBody)
MOST_TOOLS = 128  # OpenAI's limit
_UNKNOWN = "json"  # the format of required calls if the model's own is unknown


def with_allowed_tools(body: C) -> C:
    """Return a body without the tools that a `tool_choice` of type "allowed_tools" leaves out; its mode is the choice.

    Raises ApiError (400) or RequestError for a choice that names tools that are not there.
    """
    choice = body.tool_choice
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return body
    allowed = choice.get("allowed_tools")
    mode, listed = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise refusal('allowed_tools needs a mode, "auto" or "required", and tools.', "tool_choice")
    _check_count(len(body.tools or ()), "tools")
    _check_count(len(listed), "tool_choice")
    tools = read_tools(body.tools or ())
    names = {tool.name for each in listed for tool in choose_tools(tools, each)}
    kept = [given for given, tool in zip(body.tools or (), tools, strict=True) if tool.name in names]
    return body.model_copy(update={"tools": kept, "tool_choice": mode})


def _check_count(tools: int, param: str) -> None:
    if tools > MOST_TOOLS:
        raise refusal(f"There are {tools} tools and at most {MOST_TOOLS} are allowed.", param)


def with_tools(tokenizer: Tokenizer, params: SamplingParams, body: ChatBody, name: str | None) -> SamplingParams:
    """Return settings under which reasoning and calls can be read, and must be made if the request requires a call.

    name: the format of calls; None = the template's. JSON of a given form may be written in place of calls that the
    model may make. Raises RequestError for invalid tools or an invalid choice.
    """
    calls, required, form = _has_calls(body), requires_call(body), params.structured_outputs
    if not calls and required:
        raise refusal("tool_choice needs tools.", "tool_choice")
    _check_count(len(body.tools or ()) if calls else 0, "tools")
    template, found = tokenizer.template_for(bool(body.tools)), _format_of(tokenizer, body, name)
    params = with_tags(tokenizer, params, (*(find_tags(template) or ()), *(found.markers() if found else ())))
    if found is None:
        return params
    if required and form is not None:
        raise refusal("tool_choice and the form of the answer are both given: keep one.", "tool_choice")
    choice, token_id = (body.tool_choice if required else None) or "required", partial(_added_id, tokenizer)
    shapes = call_schema(body.tools or (), choice, template, name) if calls else []
    instead = None if form is None or body.continue_final_message else _symbols_of(form, found, token_id)
    if not required and instead is None:
        return params
    several = body.tool_choice in (None, "auto", "required") and body.parallel_tool_calls is not False
    separator = found.separator(template) if several else None
    compact = wants_compact(body) if form is None else form.disable_any_whitespace
    grammar = call_grammar(shapes, token_id, separator, compact, instead, found.thought(token_id))
    return dataclasses.replace(params, structured_outputs={"grammar": grammar})  # type: ignore[arg-type]


def _has_calls(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice != "none"


def _symbols_of(form: StructuredOutputs, found: type[ToolParser], token_id: TokenId) -> str | None:
    """Return the symbols of a form in the grammar of calls; None for forms other than JSON, which leave no calls.

    In a format that reads all, the symbols of every form begin with the header of a message.
    """
    if not found.reads_all:
        return form_symbol(form.source) if form.source.kind == "json" else None
    symbol = form_symbol(form.source)
    if symbol is None:
        raise refusal("This model's answers have channels, so a grammar can't be their form.", "structured_outputs")
    return f"{found.opening(token_id)} {symbol}"


def reader_for(
    tokenizer: Tokenizer, body: ChatBody, name: str | None, has_form: bool
) -> Callable[[Prompt], MessageReader]:
    """Return a function that makes the reader of an answer from its prompt. has_form: the answer has a given form."""

    def make(prompt: Prompt) -> MessageReader:
        found = _format_of(tokenizer, body, name)
        tools = None if found is None else found().after(prompt.text or "", _has_calls(body))
        reasoning = None if found is not None and found.reads_all else find_reasoning(prompt.rendered, has_form)
        return MessageReader(reasoning, tools, requires_call(body))

    return make


def finish_reason_of_calls(body: ChatBody) -> str:
    """Return the finish_reason of an answer that ends with calls: as in OpenAI, "stop" if one function was named."""
    return "tool_calls" if body.tool_choice in (None, "auto", "required") else "stop"


def _format_of(tokenizer: Tokenizer, body: ChatBody, name: str | None) -> type[ToolParser] | None:
    """Return the format in which calls are read, and written if the request requires one.

    None: the request allows no calls, and nothing else needs the format. Raises ApiError (400) if the model decides
    whether it makes calls, and its format is unknown.
    """
    found = find_format(tokenizer.template_for(tools=_has_calls(body)), name)
    if not _has_calls(body):
        return found if found is not None and found.reads_all else None
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


def unknown_formats(tokenizer: Tokenizer, name: str | None) -> list[str]:
    """Return what can't be separated from a model's text, for the server's operator: calls, or reasoning."""
    template, found = tokenizer.template_for(tools=True) or "", []
    if "tools" in template and find_format(template, name) is None:
        known = ", ".join(plugins.names("speculant.serving.tools"))
        found.append(f"the format of this model's tool calls is unknown; --tool-parser sets one of {known}")
    plain = tokenizer.chat_template or ""
    if any(tags.end in plain for tags in TAGS) and find_tags(plain) is None:
        found.append("the format of this model's reasoning is unknown, so it stays in the content of answers")
    return found


def _added_id(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the id of a text that is one added token, special or not."""
    token: int | None = tokenizer.backend.token_to_id(text)
    return token if token in tokenizer.backend.get_added_tokens_decoder() else None
