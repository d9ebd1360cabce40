"""LangChain: chats, tools that are bound with a choice, and structured output by each of its methods."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from shared import LONG, MODEL, QUESTION, TEXT, TOOL, URL, Weather, check_cancellation, refused, report

SERVER: dict[str, Any] = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**SERVER, max_tokens=400)
short = ChatOpenAI(**SERVER, max_tokens=12, temperature=0)
responses = ChatOpenAI(**SERVER, max_tokens=12, temperature=0, use_responses_api=True)


def check_chat() -> None:
    """A chat has text and a usage."""
    answer = short.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 12


def check_stream() -> None:
    """A streamed chat has the same text."""
    assert "".join(each.content for each in short.stream(QUESTION)) == short.invoke(QUESTION).content


def check_calls() -> None:
    """A forced call arrives as one, and its result can be sent back."""
    for choice in ("weather", "required", True):
        bound = chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False)
        answer = bound.invoke(QUESTION)
        (call,) = answer.tool_calls
        assert call["name"] == "weather"
        Weather(**call["args"])
        result = ToolMessage('{"warm": false}', tool_call_id=call["id"])
        assert short.invoke([HumanMessage("How is the weather in Oslo?"), answer, result]).content


def check_streamed_calls() -> None:
    """A forced call arrives as one, in pieces."""
    for choice in ("weather", "required", True):
        chunks = list(chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False).stream(QUESTION))
        whole = sum(chunks[1:], chunks[0])
        (call,) = whole.tool_calls
        Weather(**call["args"])


def check_schemas() -> None:
    """Answers are parsed into a class, whole and streamed."""
    for method in ("function_calling", "json_schema"):
        structured = chat.with_structured_output(Weather, method=method)
        assert isinstance(structured.invoke(QUESTION), Weather)
        assert isinstance(list(structured.stream(QUESTION))[-1], Weather)


def check_completions() -> None:
    """A completion, whole and streamed."""
    model = OpenAI(**SERVER, max_tokens=6, temperature=0)
    assert "".join(model.stream(TEXT)) == model.invoke(TEXT) != ""


def check_responses() -> None:
    """A response, whole and streamed."""
    whole = responses.invoke(QUESTION).text
    assert whole
    assert "".join(str(each.text) for each in responses.stream(QUESTION)) == whole


def check_response_calls() -> None:
    """A response makes a forced call."""
    bound = ChatOpenAI(**SERVER, use_responses_api=True).bind_tools([TOOL], tool_choice="weather")
    (call,) = bound.invoke(QUESTION).tool_calls
    Weather(**call["args"])


def check_full_context() -> None:
    """A conversation that is too long has an error of its own."""
    refused(ContextOverflowError, lambda: short.invoke("a b " * 20_000))


def check_errors() -> None:
    """Errors have their types."""
    other = ChatOpenAI(**{**SERVER, "model": "nothing"})
    assert "nothing" in refused(openai.NotFoundError, lambda: other.invoke(QUESTION)).message


def check_embeddings() -> None:
    """There are no embeddings; the error says so."""
    model = OpenAIEmbeddings(**SERVER, check_embedding_ctx_length=False)
    assert "route" in refused(openai.NotFoundError, lambda: model.embed_query("hi")).message


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream: Any = ChatOpenAI(**SERVER, max_tokens=LONG, extra_body={"ignore_eos": True}).stream(QUESTION)
        next(stream)
        return stream.close

    check_cancellation(begin)


report(
    f"langchain-openai {version('langchain-openai')}",
    {
        "chat": check_chat,
        "chat, streamed": check_stream,
        "tools": check_calls,
        "tools, streamed": check_streamed_calls,
        "structured output": check_schemas,
        "completions": check_completions,
        "responses": check_responses,
        "responses with tools": check_response_calls,
        "errors": check_errors,
        "a full context": check_full_context,
        "embeddings: a clear 404": check_embeddings,
        "cancellation": check_cancelled,
    },
)
