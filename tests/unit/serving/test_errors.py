"""Errors for clients: status, type and field, without the server's paths."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.errors import (
    CapacityError,
    ConfigError,
    DistributionError,
    EngineClosedError,
    EngineDeadError,
    ModelError,
    RequestError,
    SpeculantError,
)
from speculant.serving.errors import ApiError, api_error, refusal, scrub
from speculant.serving.openai.protocol import ChatBody


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ConfigError("a", "b."), 400, "invalid_request_error"),
        (RequestError("a", "b."), 400, "invalid_request_error"),
        (CapacityError("a", "b."), 429, "rate_limit_error"),
        (EngineClosedError("a", "b."), 503, "server_error"),
        (EngineDeadError("a", "b."), 503, "server_error"),
        (ModelError("no template", "b."), 400, "invalid_request_error"),
        (DistributionError("NaN", "b."), 500, "server_error"),
        (SpeculantError("a", "b."), 500, "server_error"),
        (ZeroDivisionError("secret"), 500, "server_error"),
        (ApiError(404, "x"), 404, "not_found_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_errors_have_a_status_and_a_type(error: Exception, status: int, kind: str) -> None:
    told = api_error(error)
    assert (told.status, told.kind) == (status, kind)
    assert set(told.body()["error"]) == {"message", "type", "param", "code"}


def test_foreign_errors_have_no_details() -> None:
    assert "secret" not in api_error(ZeroDivisionError("secret")).message
    assert "secret" not in api_error(EngineDeadError("died of secret", "x.")).message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/model/config.json can't be read", "[path] can't be read"),
        ("<Thing object at 0x7f3a00c01d20>", "<Thing object at [address]>"),
        (r"C:\models\x is missing", "[path] is missing"),
        ("see docs/serving.md", "see docs/serving.md"),
        ("tokens/s, and 1/2", "tokens/s, and 1/2"),
        ("use /v1", "use /v1"),
    ],
)
def test_messages_have_no_paths_and_addresses(text: str, shown: str) -> None:
    assert scrub(text) == shown


def test_long_messages_are_shortened_and_keep_their_fix() -> None:
    told = api_error(RequestError("x" * 10_000, "shorten it."))
    assert told.message.endswith("Fix: shorten it.")
    assert len(told.message) < 1000
    assert len(scrub("y" * 10_000)) == 1000


@pytest.mark.parametrize(
    "advice",
    [
        "use /v1/chat/completions.",
        "send it to /v1/completions or /v1/responses.",
        "the model '/models/mine/x' is unknown.",
    ],
)
def test_advice_and_words_of_the_client_are_kept(advice: str) -> None:
    assert refusal(advice).message == advice


def test_a_path_of_the_server_is_hidden() -> None:
    assert "/home" not in api_error(RequestError("can't read /home/me/model/x.json", "see /home/me/log.")).message


@pytest.mark.parametrize(
    ("body", "error", "param", "begins"),
    [
        ({"n": 0}, ConfigError("n=0 is not a number", "set n."), "n", "n=0 is not"),
        ({"max_completion_tokens": 0}, ConfigError("max_tokens=0 is not a number", "set max_tokens."),
         "max_completion_tokens", "max_completion_tokens=0 is not a number. Fix: set max_completion_tokens."),
        ({"max_tokens": 0}, ConfigError("max_tokens=0 is wrong", "set max_tokens."), "max_tokens", "max_tokens=0"),
        ({"logprobs": True, "top_logprobs": 200}, ConfigError("logprobs=200 is too many", "set logprobs."),
         "top_logprobs", "top_logprobs=200"),
        ({"stop": ["x"]}, ConfigError("stop must be short", "x."), "stop", "stop must"),
        ({}, RequestError("the prompt has 9 tokens, max_model_len is 8", "x."), "messages", "The prompt has"),
        ({"response_format": {"type": "text"}}, RequestError("the json of structured_outputs can't be used", "x."),
         "response_format", "The json of response_format"),
        ({"speculation": {"method": "x"}}, ConfigError("method 'x' is unknown", "x."), "speculation", "method 'x'"),
        ({"logit_bias": {"5": 1}}, RequestError("logit_bias has 5", "x."), "logit_bias", "logit_bias has"),
        ({}, RequestError("this checkpoint has no chat template", "x."), None, "This checkpoint"),
        ({"seed": 1, "user": "the"}, RequestError("the seed of all evil", "x."), None, "The seed of"),
    ],
)  # fmt: skip
def test_errors_use_the_field_name_that_was_sent(
    body: dict[str, Any], error: SpeculantError, param: str | None, begins: str
) -> None:
    sent = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **body})
    told = api_error(error, sent.sent_as)
    assert told.param == param
    assert told.message.startswith(begins)
