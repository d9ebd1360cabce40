"""LangChain by Anthropic's API: messages, tools that are bound with a choice, and structured output."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from shared import LONG, MODEL, QUESTION, ROOT, TOOL, Weather, check_cancellation, refused, report

SERVER: dict[str, Any] = {"base_url": ROOT, "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatAnthropic(**SERVER, max_tokens=400)
short = ChatAnthropic(**SERVER, max_tokens=12, temperature=0)


def check_chat() -> None:
    """A message has text and a usage, and its prompt can be counted before."""
    answer = short.invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12
    counted = short.get_num_tokens_from_messages([HumanMessage(QUESTION[0]["content"])])
    assert counted == answer.usage_metadata["input_tokens"]


def check_stream() -> None:
    """A streamed message has the same text."""
    assert "".join(str(each.text) for each in short.stream(QUESTION)) == short.invoke(QUESTION).text


def check_calls() -> None:
    """A forced call arrives as one, and its result can be sent back."""
    for choice in ("weather", "any"):
        answer = chat.bind_tools([TOOL], tool_choice=choice).invoke(QUESTION)
        assert answer.tool_calls[0]["name"] == "weather"
        Weather(**answer.tool_calls[0]["args"])
        results = [ToolMessage('{"warm": false}', tool_call_id=call["id"]) for call in answer.tool_calls]
        assert short.invoke([HumanMessage("How is the weather?"), answer, *results]).usage_metadata


def check_streamed_calls() -> None:
    """A forced call arrives as one, in pieces."""
    for choice in ("weather", "any"):
        chunks = list(chat.bind_tools([TOOL], tool_choice=choice).stream(QUESTION))
        Weather(**sum(chunks[1:], chunks[0]).tool_calls[0]["args"])


def check_schemas() -> None:
    """Answers are parsed into a class, by a forced call."""
    structured = chat.with_structured_output(Weather)
    assert isinstance(structured.invoke(QUESTION), Weather)
    assert isinstance(list(structured.stream(QUESTION))[-1], Weather)


def check_errors() -> None:
    """Errors have their types."""
    other = ChatAnthropic(**{**SERVER, "model": "nothing"}, max_tokens=4)
    assert "nothing" in refused(anthropic.NotFoundError, lambda: other.invoke(QUESTION)).message


def check_full_context() -> None:
    """A conversation that is too long has an error of its own."""
    refused(ContextOverflowError, lambda: short.invoke("a b " * 20_000))


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream: Any = ChatAnthropic(
            **SERVER, max_tokens=LONG, model_kwargs={"extra_body": {"ignore_eos": True}}
        ).stream(QUESTION)
        next(stream)
        return stream.close

    check_cancellation(begin)


report(
    f"langchain-anthropic {version('langchain-anthropic')}",
    {
        "chat": check_chat,
        "chat, streamed": check_stream,
        "tools": check_calls,
        "tools, streamed": check_streamed_calls,
        "structured output": check_schemas,
        "errors": check_errors,
        "a full context": check_full_context,
        "cancellation": check_cancelled,
    },
)
