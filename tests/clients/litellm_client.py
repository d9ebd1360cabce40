"""LiteLLM: chats, calls, schemas, completions and responses by OpenAI's API, and messages by Anthropic's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import litellm
from shared import LONG, MODEL, NAMED, QUESTION, ROOT, TEXT, TOOL, URL, Weather, check_cancellation, refused, report

SERVER: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}
CHAT: dict[str, Any] = {**SERVER, "messages": QUESTION}
SHORT: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
MESSAGES: dict[str, Any] = {**CHAT, "model": f"anthropic/{MODEL}", "api_base": ROOT}
FLAT_TOOL: Any = {"type": "function", **TOOL["function"]}  # of a response


def check_chat() -> None:
    """A chat has text and a usage."""
    answer = litellm.completion(**CHAT, **SHORT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12


def check_stream() -> None:
    """A streamed chat has the same text."""
    pieces = [each.choices[0].delta.content or "" for each in litellm.completion(**CHAT, **SHORT, stream=True)]
    assert "".join(pieces) == litellm.completion(**CHAT, **SHORT).choices[0].message.content


def check_calls() -> None:
    """A forced call arrives as one."""
    for choice in ("required", NAMED):
        calls: dict[str, Any] = {**CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        (call,) = litellm.completion(**calls).choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)


def check_streamed_calls() -> None:
    """A forced call arrives as one, in pieces."""
    for choice in ("required", NAMED):
        calls: dict[str, Any] = {**CHAT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        chunks = list(litellm.completion(**calls, stream=True))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert call.function.name == "weather"
        Weather.model_validate_json(call.function.arguments)


def check_schemas() -> None:
    """An answer has the form of a class."""
    answer = litellm.completion(**CHAT, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def check_completions() -> None:
    """A completion, whole and streamed; LiteLLM calls the route of an older name of OpenAI's provider."""
    settings = {**SERVER, "model": f"text-completion-openai/{MODEL}", "prompt": TEXT, "max_tokens": 6, "temperature": 0}
    whole = litellm.text_completion(**settings).choices[0].text
    pieces = [each.choices[0].text or "" for each in litellm.text_completion(**settings, stream=True)]
    assert "".join(pieces) == whole != ""


def check_responses() -> None:
    """A response, whole and streamed."""
    settings = {**SERVER, "input": "hi", "max_output_tokens": 5, "temperature": 0}
    whole = litellm.responses(**settings).output_text
    events = list(litellm.responses(**settings, stream=True))
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(deltas) == whole != ""


def check_response_calls() -> None:
    """A response makes a forced call."""
    calls: dict[str, Any] = {"tools": [FLAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    response = litellm.responses(**SERVER, input=QUESTION, **calls)
    (call,) = [item for item in response.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)


def check_messages() -> None:
    """A message by Anthropic's API, whole and streamed."""
    whole = litellm.completion(**MESSAGES, **SHORT)
    assert (bool(whole.choices[0].message.content), whole.usage.completion_tokens) == (True, 12)
    pieces = [each.choices[0].delta.content or "" for each in litellm.completion(**MESSAGES, **SHORT, stream=True)]
    assert "".join(pieces) == whole.choices[0].message.content


def check_message_calls() -> None:
    """A message makes a forced call, whole and streamed."""
    for choice in ("required", NAMED):
        calls: dict[str, Any] = {**MESSAGES, "tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
        chunks = list(litellm.completion(**calls, stream=True))
        for answer in (litellm.completion(**calls), litellm.stream_chunk_builder(chunks)):
            call = answer.choices[0].message.tool_calls[0]
            assert call.function.name == "weather"
            Weather.model_validate_json(call.function.arguments)


def check_full_context() -> None:
    """A conversation that is too long has an error of its own, by both APIs."""
    long = [{"role": "user", "content": "a b " * 20_000}]
    for provider in (CHAT, MESSAGES):
        refused(
            litellm.ContextWindowExceededError, lambda given=provider: litellm.completion(**{**given, "messages": long})
        )


def check_errors() -> None:
    """Errors have their types."""
    other, wrong = {**CHAT, "model": "openai/nothing"}, {**CHAT, "temperature": -1}
    assert "nothing" in str(refused(litellm.NotFoundError, lambda: litellm.completion(**other)))
    assert "temperature" in str(refused(litellm.BadRequestError, lambda: litellm.completion(**wrong)))


def check_embeddings() -> None:
    """There are no embeddings; the error says so."""
    assert "route" in str(refused(litellm.NotFoundError, lambda: litellm.embedding(**SERVER, input=["hi"])))


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream = litellm.completion(**CHAT, max_tokens=LONG, extra_body={"ignore_eos": True}, stream=True)
        next(iter(stream))
        return stream.completion_stream.close

    check_cancellation(begin)


report(
    f"litellm {version('litellm')}",
    {
        "chat": check_chat,
        "chat, streamed": check_stream,
        "tools": check_calls,
        "tools, streamed": check_streamed_calls,
        "structured output": check_schemas,
        "completions": check_completions,
        "responses": check_responses,
        "responses with tools": check_response_calls,
        "messages": check_messages,
        "messages with tools": check_message_calls,
        "errors": check_errors,
        "a full context": check_full_context,
        "embeddings: a clear 404": check_embeddings,
        "cancellation": check_cancelled,
    },
)
