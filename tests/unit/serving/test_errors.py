"""What clients are told, and what they are not."""

from __future__ import annotations

import pytest

from speculant.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    SpeculantError,
)
from speculant.serving.errors import ApiError, api_error, scrub


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ConfigError("a", "b."), 400, "invalid_request_error"),
        (RequestError("a", "b."), 400, "invalid_request_error"),
        (CapacityError("a", "b."), 429, "rate_limit_error"),
        (EngineClosedError("a", "b."), 503, "server_error"),
        (EngineDeadError("a", "b."), 503, "server_error"),
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


def test_foreign_errors_are_not_told() -> None:
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


def test_long_messages_are_cut_and_keep_their_fix() -> None:
    told = api_error(RequestError("x" * 10_000, "shorten it."))
    assert told.message.endswith("Fix: shorten it.")
    assert len(told.message) < 1000
    assert len(scrub("y" * 10_000)) == 1000
