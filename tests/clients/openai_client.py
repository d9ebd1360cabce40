"""OpenAI's own client: forced calls, streamed calls, schemas, responses, and fields that change the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
from shared import KNOWS_CALLS, MODEL, NAMED, QUESTION, TOOL, URL, Weather

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
ONE_CALL: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [TOOL], "parallel_tool_calls": False}
PLAIN: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}


def check_calls() -> None:
    """A forced call arrives as one, whole and streamed."""
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop")):
        (answer,) = client.chat.completions.create(**ONE_CALL, tool_choice=choice).choices
        (call,) = answer.message.tool_calls or ()
        assert (call.function.name, answer.finish_reason, answer.message.content) == ("weather", reason, None)
        Weather.model_validate_json(call.function.arguments)
        pieces, last = [], None
        for chunk in client.chat.completions.create(**ONE_CALL, tool_choice=choice, stream=True):
            assert not chunk.choices[0].delta.content
            pieces += chunk.choices[0].delta.tool_calls or []
            last = chunk.choices[0].finish_reason
        assert (pieces[0].function.name, pieces[0].type, last) == ("weather", "function", reason)
        assert pieces[0].id
        Weather.model_validate_json("".join(piece.function.arguments for piece in pieces))


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


def check_schemas() -> None:
    """Answers are parsed into a class, by chats and by responses."""
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, response_format=Weather) as stream:
        stream.until_done()
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)
    response = client.responses.parse(model=MODEL, input="The weather in Oslo?", text_format=Weather)
    assert isinstance(response.output_parsed, Weather)


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


def check_tool_loop() -> None:
    """A response calls a function, another one continues it, and both can be read and deleted."""
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {"model": MODEL, "input": "Oslo?", "tools": [tool], "tool_choice": "required"}
    first = client.responses.create(**asked, parallel_tool_calls=False)
    (call,) = (item for item in first.output if item.type == "function_call")
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        stream.until_done()
        assert stream.get_final_response().output[-1].type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    second = client.responses.create(model=MODEL, input=[result], previous_response_id=first.id, max_output_tokens=8)
    assert second.previous_response_id == first.id
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert (kinds[0], kinds[-2:]) == ("message", ["function_call", "function_call_output"])
    begun = client.responses.create(model=MODEL, input="hi", background=True, max_output_tokens=200)
    assert client.responses.cancel(begun.id).status in ("cancelled", "completed", "incomplete")
    for response in (second, begun):
        client.responses.delete(response.id)
    try:
        client.responses.retrieve(second.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a deleted response is still there")


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


for check in (check_calls, check_auto, check_schemas, check_responses, check_tool_loop, check_fields):
    check()
print(f"openai {openai.__version__}: calls, schemas, responses, tool loops and fields")
