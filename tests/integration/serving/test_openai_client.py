"""OpenAI's own client against a live server; every answer and chunk has the form of OpenAI's OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.openai_schema import Check, Recorder, schema_path
from tests.servers import LiveServer

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24}
MESSAGES: list[Any] = [{"role": "user", "content": "def fibonacci(n):"}]
PROMPT = "def read(path):\n"
USAGE = {"include_usage": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "size": {"enum": [1, 2]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture
def client(demo: LiveServer, conforms: Check) -> Iterator[Any]:
    """Return a client; all of its answers are validated."""
    recorder = Recorder()
    with httpx.Client(transport=recorder) as http:
        yield openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0, timeout=30, http_client=http)
    assert recorder.check(conforms) > 0


@pytest.mark.skipif(schema_path() is None, reason="SPECULANT_OPENAI_SCHEMA names no OpenAPI document of OpenAI's")
def test_the_schema_refuses_other_answers(conforms: Check) -> None:
    with pytest.raises(AssertionError, match="is a required property"):
        conforms("CreateChatCompletionResponse", {"id": "x"})


def test_chat_answers(client: Any) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_equals_unstreamed(client: Any) -> None:
    settings = {**GREEDY, "messages": MESSAGES, "temperature": 1, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**settings)
    streamed = list(client.chat.completions.create(stream=True, stream_options=USAGE, **settings))
    for index in (0, 1):
        own = [choice for chunk in streamed for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == whole.choices[index].message.content
        assert own[-1].finish_reason == whole.choices[index].finish_reason
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in streamed}) == 1


def test_completion_answers(client: Any) -> None:
    answer = client.completions.create(prompt=[PROMPT, "import os"], n=2, logprobs=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens).startswith(choice.text)
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 24
        assert all(len(top) in (2, 3) for top in logprobs.top_logprobs)


@pytest.mark.parametrize("options", [{}, {"stream_options": USAGE}], ids=["plain", "usage"])
def test_streamed_completion_equals_unstreamed(client: Any, options: dict[str, Any]) -> None:
    whole = client.completions.create(prompt=PROMPT, logprobs=1, **GREEDY)
    chunks = list(client.completions.create(prompt=PROMPT, logprobs=1, stream=True, **GREEDY, **options))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "text_offset"):
        streamed = [each for choice in choices if choice.logprobs for each in getattr(choice.logprobs, name)]
        assert streamed == getattr(whole.choices[0].logprobs, name)
    assert (chunks[-1].usage is not None) == bool(options)


def test_chat_logprobs_have_bytes(client: Any) -> None:
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    text = b"".join(bytes(entry.bytes) for entry in entries).decode()
    assert text.startswith(answer.choices[0].message.content)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)  # greedy: the first is the best
    chunks = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content] == entries


def test_a_prediction_is_counted(client: Any) -> None:
    plain = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    guess = {"type": "content", "content": [{"type": "text", "text": text}]}
    fixed = {"speculation": {"num_speculative_tokens": 8}}
    answer = client.chat.completions.create(messages=MESSAGES, prediction=guess, extra_body=fixed, **GREEDY)
    assert answer.choices[0].message.content == text
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 10
    settings = {**GREEDY, "messages": MESSAGES, "prediction": guess, "stream": True, "stream_options": USAGE}
    chunks = list(client.chat.completions.create(extra_body=fixed, **settings))
    assert chunks[-1].usage.completion_tokens_details == details
    half = {"type": "content", "content": text[: len(text) // 2] + " departs from here, and goes on " * 3}
    answer = client.chat.completions.create(messages=MESSAGES, prediction=half, **GREEDY)
    assert answer.choices[0].message.content == text
    assert 0 < answer.usage.completion_tokens_details.accepted_prediction_tokens < details.accepted_prediction_tokens
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_has_its_form(client: Any, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    settings = {**GREEDY, "max_tokens": 100, "messages": MESSAGES, "response_format": form, "stream": stream}
    answer = client.chat.completions.create(**settings)
    text = (
        "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)
        if stream
        else answer.choices[0].message.content
    )
    assert json.loads(text)["size"] in (1, 2)
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.completions.create(prompt="Is it?", extra_body=extra, **GREEDY)
    assert answer.choices[0].text in ("yes", "no")


def test_responses_answer_and_stream(client: Any) -> None:
    settings = {"model": "demo", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(input="hello", instructions="Be brief.", **settings)
    assert whole.output_text
    events = list(client.responses.create(input=[{"role": "user", "content": "hello"}], stream=True, **settings))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    assert {event.type for event in events} >= {"response.created", "response.output_text.done"}


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("NotFoundError", {"model": "another"}),
        ("BadRequestError", {"n": 1000}),
        ("BadRequestError", {"temperature": -1}),
        ("BadRequestError", {"extra_body": {"guided_json": {}}}),
        ("BadRequestError", {"extra_body": {"prompt": 5}}),
        ("BadRequestError", {"prompt": "x y " * 2000}),
        ("BadRequestError", {"prompt": [10**9]}),
        ("BadRequestError", {"prompt": []}),
        ("BadRequestError", {"suffix": "x", "echo": True}),
        ("BadRequestError", {"stop": ["x"] * 100}),
        ("BadRequestError", {"stream": True, "prompt": "x y " * 2000}),
    ],
)
def test_errors_have_openai_s_shape(client: Any, kind: str, given: dict[str, Any]) -> None:
    with pytest.raises(getattr(openai, kind)) as caught:
        client.completions.create(**{**GREEDY, "prompt": PROMPT, **given})
    assert caught.value.response.headers["x-request-id"]
