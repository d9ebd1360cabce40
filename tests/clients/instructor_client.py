"""Instructor: classes from tool calls, from a schema, from any JSON object and from responses."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import instructor
import openai
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, ConfigDict
from shared import LONG, MODEL, QUESTION, URL, Weather, check_cancellation, closing_token, refused, report


class Anything(BaseModel):
    """Any object: what a mode that sends no schema can promise."""

    model_config = ConfigDict(extra="allow")


server = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
BASE: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_retries": 0, "logit_bias": {closing_token(): 100}}


def client(mode: instructor.Mode) -> Any:
    """Return a client that asks for classes in one of the ways."""
    return instructor.from_openai(server, mode=mode)


def check_chat() -> None:
    """A chat without a class passes through."""
    answer = client(instructor.Mode.TOOLS).chat.completions.create(
        model=MODEL, messages=QUESTION, response_model=None, max_tokens=12
    )
    assert answer.choices[0].message.content


def check_tools() -> None:
    """A class from a call."""
    answer = client(instructor.Mode.TOOLS).chat.completions.create(**BASE, response_model=Weather)
    assert isinstance(answer, Weather)


def check_streamed_tools() -> None:
    """A class that is filled while the call arrives."""
    *_, last = client(instructor.Mode.TOOLS).chat.completions.create_partial(**BASE, response_model=Weather)
    Weather.model_validate(last.model_dump())


def check_schemas() -> None:
    """A class from a schema, and any object."""
    for mode, kind in ((instructor.Mode.JSON_SCHEMA, Weather), (instructor.Mode.JSON, Anything)):
        answer = client(mode).chat.completions.create(**BASE, response_model=kind)
        assert isinstance(answer, kind), answer


def check_response_calls() -> None:
    """A class from a call of a response."""
    answer = client(instructor.Mode.RESPONSES_TOOLS).responses.create(
        model=MODEL, input="How is the weather in Oslo?", response_model=Weather, max_retries=0
    )
    assert isinstance(answer, Weather)


def check_errors() -> None:
    """The server's error is the cause of the client's."""
    create = client(instructor.Mode.TOOLS).chat.completions.create
    error = refused(InstructorRetryException, lambda: create(**{**BASE, "model": "nothing"}, response_model=Weather))
    assert "nothing" in str(error)


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream = client(instructor.Mode.TOOLS).chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            response_model=None,
            max_tokens=LONG,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        return stream.close

    check_cancellation(begin)


report(
    f"instructor {version('instructor')}",
    {
        "chat": check_chat,
        "tools": check_tools,
        "tools, streamed": check_streamed_tools,
        "structured output": check_schemas,
        "responses with tools": check_response_calls,
        "errors": check_errors,
        "cancellation": check_cancelled,
    },
)
