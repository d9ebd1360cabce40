"""OpenAI's own client: every call that the server has, and fields that change the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
from shared import (
    KNOWS_CALLS,
    LONG,
    MODEL,
    NAMED,
    QUESTION,
    TEXT,
    TOOL,
    URL,
    Weather,
    check_cancellation,
    refused,
    report,
)

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
ONE_CALL: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [TOOL], "parallel_tool_calls": False}
PLAIN: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
FLAT_TOOL: Any = {"type": "function", "strict": True, **TOOL["function"]}  # of a response


def check_chat() -> None:
    """A chat has text, a reason and a usage."""
    answer = client.chat.completions.create(**PLAIN)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert [each.id for each in client.models.list()][:1] == [MODEL]


def check_stream() -> None:
    """A streamed chat has the same text, and the usage at its end."""
    whole = client.chat.completions.create(**PLAIN).choices[0].message.content
    chunks = list(client.chat.completions.create(**PLAIN, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == whole
    assert chunks[-1].usage is not None


def check_calls() -> None:
    """A forced call arrives as one."""
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        (answer,) = client.chat.completions.create(**ONE_CALL, tool_choice=choice).choices
        (call,) = answer.message.tool_calls or ()
        assert (call.function.name, answer.finish_reason, answer.message.content) == ("weather", reason, None)
        Weather.model_validate_json(call.function.arguments)


def check_auto() -> None:
    """Calls that the model may make need a format; where there is none the error names the flag."""
    try:
        (answer,) = client.chat.completions.create(**ONE_CALL, tool_choice="auto", max_tokens=8).choices
    except openai.BadRequestError as error:
        refused = str(error)
    else:
        assert answer.message.content or answer.message.tool_calls
        refused = ""
    assert ("--tool-parser" in refused) is not KNOWS_CALLS


def check_streamed_calls() -> None:
    """A forced call arrives as one, in pieces."""
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        pieces, last = [], None
        for chunk in client.chat.completions.create(**ONE_CALL, tool_choice=choice, stream=True):
            assert not chunk.choices[0].delta.content
            pieces += chunk.choices[0].delta.tool_calls or []
            last = chunk.choices[0].finish_reason
        assert (pieces[0].function.name, pieces[0].type, last) == ("weather", "function", reason)
        assert pieces[0].id
        Weather.model_validate_json("".join(piece.function.arguments for piece in pieces))


def check_schemas() -> None:
    """Answers are parsed into a class, by chats and by responses."""
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, response_format=Weather) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    response = client.responses.parse(model=MODEL, input=TEXT, text_format=Weather)
    assert isinstance(response.output_parsed, Weather)


def check_completions() -> None:
    """Completions of several prompts, whole and streamed."""
    settings: dict[str, Any] = {"model": MODEL, "prompt": [TEXT, "def"], "max_tokens": 6, "temperature": 0}
    whole = [each.text for each in client.completions.create(**settings, logprobs=1).choices]
    streamed = ["", ""]
    for chunk in client.completions.create(**settings, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == whole


def check_responses() -> None:
    """Responses keep to their limit and have log-probabilities, whole and streamed."""
    settings: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 5, "temperature": 0}
    response = client.responses.create(**settings, include=["message.output_text.logprobs"], top_logprobs=2)
    assert response.usage is not None
    assert (response.usage.output_tokens, response.status) == (5, "incomplete")
    assert len(response.output[-1].content[0].logprobs) == 5
    *events, last = client.responses.create(**settings, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", response.output_text)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == response.output_text


def check_response_calls() -> None:
    """A response makes a forced call, and goes on with the call's output."""
    settings: dict[str, Any] = {"model": MODEL, "tools": [FLAT_TOOL], "parallel_tool_calls": False}
    first = client.responses.create(**settings, input=QUESTION, tool_choice="required")
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "weather"
    Weather.model_validate_json(call.arguments)
    events = list(client.responses.create(**settings, input=QUESTION, tool_choice="required", stream=True))
    pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    Weather.model_validate_json("".join(pieces))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": '{"warm": false}'}
    given = [*QUESTION, call.model_dump(exclude_none=True), output]
    last = client.responses.create(**settings, input=given, tool_choice="none", max_output_tokens=5)
    assert last.output_text


def check_stored_responses() -> None:
    """A response is kept, continued, listed and deleted."""
    settings: dict[str, Any] = {"model": MODEL, "max_output_tokens": 5, "temperature": 0}
    first = client.responses.create(**settings, input="hi", store=True)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**settings, input="and then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.input_items.list(first.id).data
    client.responses.delete(first.id)
    unkept = client.responses.create(**settings, input="hi", store=False)
    for gone in (first.id, unkept.id):
        refused(openai.NotFoundError, lambda gone=gone: client.responses.retrieve(gone))


def check_background() -> None:
    """A response in the background is cancelled, and deleted."""
    begun = client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=200)
    assert client.responses.cancel(begun.id).status in ("cancelled", "completed", "incomplete")
    client.responses.delete(begun.id)
    refused(openai.NotFoundError, lambda: client.responses.retrieve(begun.id))


def check_full_context() -> None:
    """A conversation that is too long has a code of its own."""
    long: Any = [{"role": "user", "content": "a b " * 20_000}]
    error = refused(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=long))
    assert error.code == "context_length_exceeded"


def check_errors() -> None:
    """An error has the type of its status, and names the wrong field."""
    wrong: tuple[tuple[type[openai.APIStatusError], dict[str, Any]], ...] = (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": []}),
        (openai.NotFoundError, {"model": "nothing"}),
    )
    for kind, given in wrong:
        error = refused(kind, lambda given=given: client.chat.completions.create(**{**PLAIN, **given}))
        assert error.param in given, error
        assert error.param in error.message


def check_embeddings() -> None:
    """There are no embeddings; the error says so."""
    error = refused(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="hi"))
    assert "route" in error.message, error


def check_cancelled() -> None:
    """A stream that is closed ends its request."""

    def begin() -> Callable[[], object]:
        stream = client.chat.completions.create(
            **{**PLAIN, "max_tokens": LONG}, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        return stream.close

    check_cancellation(begin)


def text_of(**given: Any) -> str:
    """Return the text of a plain answer with some fields more."""
    extra = {name: given.pop(name) for name in list(given) if name not in NATIVE}
    return client.chat.completions.create(**{**PLAIN, **given}, extra_body=extra).choices[0].message.content or ""


NATIVE = ("logit_bias", "stop", "max_tokens", "seed", "temperature", "n")


def check_fields() -> None:
    """A field that changes the answer is honoured or refused."""
    plain = text_of()
    word = plain.split()[0]
    honoured: dict[str, tuple[Any, Callable[[str], bool]]] = {
        "stop": ([word], lambda text: word not in text),
        "bad_words": ([word], lambda text: word not in text),
        "structured_outputs": ({"choice": ["yes", "no"]}, ("yes", "no").__contains__),
        "response_format": ({"type": "json_object"}, lambda text: text.startswith("{")),
        "allowed_token_ids": ([70], lambda text: len(set(text)) <= 2),
        "guided_regex": ("[0-9]+", str.isdigit),
        "grammar": ('root ::= "yes"', "yes".__eq__),
        "typical_p": (0.1, plain.__ne__),
        "mirostat": (2, plain.__ne__),
        "dry_multiplier": (2.0, plain.__ne__),
        "thinking_token_budget": (1, plain.__ne__),
    }
    dropped = []
    for name, (value, honours) in honoured.items():
        try:
            if not honours(text_of(**{name: value})):
                dropped.append(name)
        except openai.BadRequestError as error:
            if name not in str(error):
                raise
    assert not dropped, f"dropped: {dropped}"


report(
    f"openai {openai.__version__}",
    {
        "chat": check_chat,
        "chat, streamed": check_stream,
        "tools": check_calls,
        "tools, chosen by the model": check_auto,
        "tools, streamed": check_streamed_calls,
        "structured output": check_schemas,
        "completions": check_completions,
        "responses": check_responses,
        "responses with tools": check_response_calls,
        "stored responses": check_stored_responses,
        "responses in the background": check_background,
        "errors": check_errors,
        "a full context": check_full_context,
        "embeddings: a clear 404": check_embeddings,
        "cancellation": check_cancelled,
        "other fields": check_fields,
    },
)
