"""Anthropic's own client, sync and async: messages, streams, thinking, a loop of tools, counts, an agent's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import anthropic
from shared import (
    KNOWS_CALLS,
    LONG,
    MODEL,
    QUESTION,
    ROOT,
    TOOL,
    Weather,
    check_cancellation,
    closing_token,
    refused,
    report,
)

client = anthropic.Anthropic(base_url=ROOT, api_key="none", max_retries=0)
GREEDY = {"temperature": 0}  # which the package no longer names
PLAIN: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "extra_body": GREEDY}
WEATHER: Any = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
ONE_CALL: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 200,
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


def text_of(message: Any) -> str:
    """Return the text of a message."""
    return "".join(block.text for block in message.content if block.type == "text")


def check_messages() -> None:
    """A message has text, a reason and a usage; the model is listed."""
    answer = client.messages.create(**PLAIN)
    assert text_of(answer)
    assert (answer.usage.output_tokens, answer.stop_reason) == (12, "max_tokens")
    assert [each.id for each in client.models.list()][:1] == [MODEL]
    assert client.models.retrieve(MODEL).display_name == MODEL


def check_stream() -> None:
    """A streamed message is the whole one, by its events and by the client's helper."""
    whole = client.messages.create(**PLAIN)
    pieces = [each.delta.text for each in client.messages.create(**PLAIN, stream=True) if each.type.endswith("k_delta")]
    assert "".join(pieces) == text_of(whole)
    with client.messages.stream(**PLAIN) as stream:
        assert "".join(stream.text_stream) == text_of(whole)
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (text_of(whole), whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens


def check_async() -> None:
    """The same, from an event loop, with several requests at a time."""
    whole = text_of(client.messages.create(**PLAIN))

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=ROOT, api_key="none", max_retries=0) as server:

            async def streamed() -> str:
                async with server.messages.stream(**PLAIN) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*(streamed() for _ in range(3)))

    assert asyncio.run(ask()) == [whole] * 3


def check_calls() -> None:
    """A forced call arrives as one, and the conversation goes on with its result."""
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked = {**ONE_CALL, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        answer = client.messages.create(**asked)
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        Weather.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "4 degrees"}]}
        turns = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(
            **{**PLAIN, "messages": turns, "tools": [WEATHER], "tool_choice": {"type": "none"}}
        )
        assert text_of(last)


def check_streamed_calls() -> None:
    """A forced call arrives as one, in pieces."""
    with client.messages.stream(**ONE_CALL) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = stream.get_final_message().content
    Weather.model_validate_json("".join(pieces))
    Weather.model_validate(call.input)


def check_tool_runner() -> None:
    """The client's own loop calls a tool, and sends its result."""
    if not KNOWS_CALLS:
        return
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """Return the weather.

        Args:
            city: a city
        """
        asked.append(city)
        return "4 degrees"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        tools=[weather],
        messages=QUESTION,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=2,
        extra_body={"logit_bias": {closing_token(): 40}},
    )
    assert [message.stop_reason for message in runner]
    assert len(asked) >= 1


def check_schemas() -> None:
    """An answer has the form of a class."""
    answer = client.messages.parse(model=MODEL, max_tokens=200, messages=QUESTION, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)


def check_count() -> None:
    """A count is the usage of the message."""
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "system": "Be brief.", "tools": [WEATHER]}
    given["tool_choice"] = {"type": "none"}
    used = client.messages.create(**given, max_tokens=1).usage
    count = client.messages.count_tokens(**given).input_tokens
    assert count == used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)


def check_thinking() -> None:
    """Thinking is switched on; its blocks, if the model thinks, go back as they came."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**{**PLAIN, "max_tokens": 100}, thinking=thinking, stop_sequences=["e"]) as stream:
        answer = stream.get_final_message()
    turns = [*QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And now?"}]
    assert client.messages.create(**{**PLAIN, "messages": turns}, thinking={"type": "disabled"}).usage.output_tokens


def check_agent() -> None:
    """A coding agent's turns: a long system prompt in blocks, three dozen tools, parallel calls and their results."""
    schema = {"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"], "additionalProperties": False}
    tools = [{"name": f"tool_{number}", "description": "Edits.", "input_schema": schema} for number in range(36)]
    settings: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "tools": tools if KNOWS_CALLS else [],
        "metadata": {"user_id": "user_1"},
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    turns: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>x</system-reminder>"}]},
        {"role": "user", "content": [{"type": "text", "text": "fix it", "cache_control": {"type": "ephemeral"}}]},
    ]
    cached = []
    for turn in range(2):
        system: list[Any] = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Rules. " * 20, "cache_control": {"type": "ephemeral"}},
        ]
        forced = {"tool_choice": {"type": "any"}} if KNOWS_CALLS else {}
        with client.beta.messages.stream(**settings, system=system, messages=turns, **forced) as stream:
            answer = stream.get_final_message()
        cached.append(answer.usage.cache_read_input_tokens or 0)
        calls = [block for block in answer.content if block.type == "tool_use"]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "no such file", "is_error": True}
            for call in calls
        ]
        turns += [
            {"role": "assistant", "content": answer.content or "done"},
            {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
        ]
    assert cached[1] > cached[0]


def check_errors() -> None:
    """An error has the class of its status; a prompt that is too long is one that agents understand."""
    other = refused(anthropic.NotFoundError, lambda: client.messages.create(**{**PLAIN, "model": "nothing"}))
    assert other.body["error"]["type"] == "not_found_error"
    assert other.request_id
    cold = {**PLAIN, "extra_body": {"temperature": -1}}
    wrong = refused(anthropic.BadRequestError, lambda: client.messages.create(**cold))
    assert "temperature" in wrong.message
    long = {**PLAIN, "messages": [{"role": "user", "content": "word " * 20_000}]}
    for call in (lambda: client.messages.create(**long), lambda: list(client.messages.create(**long, stream=True))):
        assert "prompt is too long" in refused(anthropic.BadRequestError, call).message
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}]}]
    assert (
        "image"
        in refused(anthropic.BadRequestError, lambda: client.messages.create(**{**PLAIN, "messages": image})).message
    )


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream = client.messages.create(
            model=MODEL, messages=QUESTION, max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        return stream.close

    check_cancellation(begin)


report(
    f"anthropic {anthropic.__version__}",
    {
        "chat": check_messages,
        "chat, streamed": check_stream,
        "chat, from an event loop": check_async,
        "tools": check_calls,
        "tools, streamed": check_streamed_calls,
        "tools, in the client's loop": check_tool_runner,
        "structured output": check_schemas,
        "thinking": check_thinking,
        "counts of tokens": check_count,
        "an agent's turns": check_agent,
        "errors": check_errors,
        "cancellation": check_cancelled,
    },
)
