"""Bodies are read strictly, refused in OpenAI's shape, and every setting of them reaches `SamplingParams`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from speculant import SamplingParams
from speculant.errors import ConfigError
from speculant.serving import (
    MOST_ENTRIES,
    REFUSED,
    SETTINGS,
    ApiError,
    Body,
    ChatBody,
    CompletionBody,
    GeneratingBody,
    MessagesBody,
    ResponseBody,
    as_chat,
    chat_of,
    chat_params,
    completion_params,
    count_entries,
    read_body,
    with_bounded_drafts,
)
from tests.documented_fields import VALUES
from tests.unit.text.tokenizers_for_tests import byte_level
from tests.whole_numbers import WRONG, places


def refused(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_body(CompletionBody, raw)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("prompt", ['"a"', '["a", "b"]', "[1, 2]", "[[1], [2, 3]]"])
def test_every_form_of_a_prompt_is_read(prompt: str) -> None:
    assert read_body(CompletionBody, b'{"prompt": %s}' % prompt.encode()).prompt


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", '"3"'), ("n", "true"), ("n", "1.5"), ("temperature", '"1"'), ("stream", "1"), ("stop", "[1]"),
     ("prompt", '[1, "a"]'), ("prompt", "[]"), ("prompt", "null"), ("logit_bias", "[1]"), ("seed", "[]")],
)  # fmt: skip
def test_other_types_are_refused(field: str, value: str) -> None:
    error = refused(b'{"prompt": "a", "%s": %s}' % (field.encode(), value.encode()))
    assert (error.param, error.kind, error.code) == (field, "invalid_request_error", "invalid_type")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"1", b"\xff", b'{"prompt": "\\ud800"}', b'{"a": ' + b"[" * 10**6])
def test_a_body_other_than_a_json_object_is_refused(raw: bytes) -> None:
    assert refused(raw).message


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - CompletionBody.model_fields.keys()))
def test_fields_that_would_change_the_answer_are_refused(name: str) -> None:
    error = refused(b'{"prompt": "a", "%s": {"x": 1}}' % name.encode())
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert read_body(CompletionBody, b'{"prompt": "a", "%s": null}' % name.encode())


def test_other_unknown_fields_are_accepted() -> None:
    assert read_body(CompletionBody, b'{"prompt": "a", "user": "x", "store": true, "surprise": [1]}')


@pytest.mark.parametrize(
    "raw",
    [b'{"prompt": [' + b'"a",' * 500_000 + b"1]}", b'{"prompt": [' + b"1," * 500_000 + b'"a"]}',
     b'{"prompt": "a", "stop": [' + b"1," * 500_000 + b"1]}"],
)  # fmt: skip
def test_a_long_list_of_wrong_items_is_refused_quickly(raw: bytes) -> None:
    started = time.thread_time()
    assert len(refused(raw).message) < 1000
    assert time.thread_time() - started < 1


def test_messages_have_text_parts_and_calls() -> None:
    call: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    raw = ChatBody.model_validate({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert raw.messages[0].tool_calls is not None
    assert raw.messages[0].tool_calls[0].function.name == "f"


def test_schemas_of_bodies_keep_their_names() -> None:
    """Generated clients name their classes after the schemas of the OpenAPI document."""
    names = CompletionBody.model_json_schema()["$defs"].keys()
    assert names >= {"Prediction", "StreamOptions", "Extras"}


texts = st.text(st.sampled_from('a"\\,[{}]:é'), max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner)
)


def entries(value: Any) -> int:
    """Return the entries of all lists and objects of a value."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) + sum(map(entries, inner))


@given(values, st.booleans(), st.none() | st.just(1))
def test_entries_are_counted_without_parsing(value: Any, ascii_only: bool, indent: int | None) -> None:
    """Empty lists and objects count as one entry, and so does the value."""
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert entries(value) <= count_entries(raw, plain_most=0) <= 2 * entries(value) + 1
    assert count_entries(raw) >= entries(value)


@pytest.mark.parametrize(
    "item", [b"1", b"{}", b'""', b'{"a":1}', b'"\\\\"', b'"\\""', b"[[]]", b'{"":"","a":""}'], ids=repr
)
def test_bodies_with_too_many_entries_are_refused(item: bytes) -> None:
    """The parser's time and memory depend on them; the bytes of a body may be within their bound."""
    most = MOST_ENTRIES // (1 + item.count(b"[") + item.count(b"{") + item.count(b","))
    fits = b'{"prompt":"a","x":[' + b",".join([item] * (most - 3)) + b"]}"
    assert read_body(CompletionBody, fits)
    error = refused(b'{"prompt":"a","x":[' + b",".join([item] * (2 * most)) + b"]}")
    assert (error.code, str(MOST_ENTRIES) in error.message) == ("body_too_large", True)


@pytest.mark.parametrize("mark", [b'"', b",", b"{", rb"\\", rb"\"", rb"\u005b"], ids=repr)
def test_marks_within_a_text_are_no_entries(mark: bytes) -> None:
    if mark != b'"':
        assert read_body(CompletionBody, b'{"prompt":"' + mark * 600_000 + b'"}').prompt
    assert refused(b'{"prompt":"' + mark * 600_000 + b'",').code in ("invalid_json", "body_too_large")


@pytest.mark.parametrize(("kind", "name"), [(CompletionBody, "logit_bias"), (ResponseBody, "metadata")])
def test_only_the_first_of_many_errors_is_made(kind: type[Body], name: str) -> None:
    """An object with 60,000 wrong values has one error, as a list has: each error takes time and memory."""
    wrong = b",".join(b'"%d": []' % number for number in range(60_000))
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(b'{"prompt": "a", "input": "a", "%s": {%s}}' % (name.encode(), wrong))
    assert caught.value.error_count() == 1


ROUTES: dict[str, tuple[type[GeneratingBody], dict[str, Any], Callable[[Any, Any], SamplingParams]]] = {
    "completions": (CompletionBody, {"prompt": "x"}, completion_params),
    "chat": (ChatBody, {"messages": [{"role": "user", "content": "x"}]}, chat_params),
    "responses": (ResponseBody, {"input": "x"}, lambda engine, body: chat_params(engine, as_chat(body))),
    "messages": (
        MessagesBody,
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
        lambda engine, body: chat_params(engine, chat_of(body)),
    ),
}
OWN = {"beam_width": 2, "speculation": False}
BESIDE = {"length_penalty": {"beam_width": 2}}  # other settings that a setting needs
# Settings that a route refuses, or has under another name.
NOT_OF = {"responses": {"n", "max_tokens", "prompt_logprobs"}, "messages": {"n", "stop", "prompt_logprobs"}}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_is_passed_on(route: str, name: str) -> None:
    kind, base, read = ROUTES[route]
    if name in NOT_OF.get(route, ()):
        return
    value: Any = {**VALUES, **OWN}[name]
    engine = SimpleNamespace(default_params=SamplingParams(), prediction_method=None, tokenizer=byte_level())
    params = read(engine, kind.model_validate({**base, **BESIDE.get(name, {}), name: value}))
    expected = {5: 1.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
    found = getattr(params, name)
    assert (tuple(found) if isinstance(value, list) else found) == expected != getattr(SamplingParams(), name)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", sorted({*places()} & SETTINGS))
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_whole_number_of_a_body_is_no_other_value(route: str, name: str, value: Any) -> None:
    kind, base, read = ROUTES[route]
    if name == "bad_words" and isinstance(value, str):
        return  # a word, letter by letter
    sent = json.loads(json.dumps({**base, name: places()[name](value)}))
    engine = SimpleNamespace(default_params=SamplingParams(), prediction_method=None, tokenizer=byte_level())
    with pytest.raises((ValidationError, ConfigError, ApiError)):
        read(engine, kind.model_validate(sent))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_of_a_wrong_type_is_refused(name: str) -> None:
    for kind, *_ in ROUTES.values():
        assert name in kind.model_fields


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (None, None),
        (False, False),
        ({"method": "ngram"}, {"method": "ngram"}),
        ({"num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
        ({"num_speculative_tokens": 512, "method": "ngram"}, {"num_speculative_tokens": 16, "method": "ngram"}),
    ],
)
def test_a_clients_drafts_have_a_bound(speculation: Any, expected: Any) -> None:
    assert with_bounded_drafts(SamplingParams(speculation=speculation), 16).speculation == expected
