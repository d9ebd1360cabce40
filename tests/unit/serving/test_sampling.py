"""Every setting of a body reaches `SamplingParams`."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from speculant import SamplingParams
from speculant.errors import ConfigError
from speculant.serving import (
    SETTINGS,
    ApiError,
    ChatBody,
    CompletionBody,
    GeneratingBody,
    ResponseBody,
    as_chat,
    chat_params,
    completion_params,
    with_bounded_drafts,
)
from tests.documented_fields import VALUES
from tests.whole_numbers import WRONG, places

ROUTES: dict[str, tuple[type[GeneratingBody], dict[str, Any], Callable[[Any, Any], SamplingParams]]] = {
    "completions": (CompletionBody, {"prompt": "x"}, completion_params),
    "chat": (ChatBody, {"messages": [{"role": "user", "content": "x"}]}, chat_params),
    "responses": (ResponseBody, {"input": "x"}, lambda engine, body: chat_params(engine, as_chat(body))),
}
OWN = {"beam_width": 2, "speculation": False}
BESIDE = {"length_penalty": {"beam_width": 2}}  # other settings that a setting needs
NOT_OF_RESPONSES = {"n", "max_tokens", "prompt_logprobs"}  # refused, or under another name


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_is_passed_on(route: str, name: str) -> None:
    kind, base, read = ROUTES[route]
    if route == "responses" and name in NOT_OF_RESPONSES:
        return
    value: Any = {**VALUES, **OWN}[name]
    engine = SimpleNamespace(default_params=SamplingParams(), prediction_method=None)
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
    engine = SimpleNamespace(default_params=SamplingParams(), prediction_method=None)
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
