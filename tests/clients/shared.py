"""What the Python clients ask for, how they reach the server, and how they report."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict

URL, MODEL = os.environ["CLIENT_URL"], os.environ["CLIENT_MODEL"]
ROOT = URL.removesuffix("/v1")
KNOWS_CALLS = bool(os.environ["CLIENT_CALLS"])  # whether the template's format of calls is known
QUESTION: list[Any] = [{"role": "user", "content": "How is the weather in Oslo?"}]
TEXT = "The weather in Oslo"
LONG = 900  # tokens: an answer that is still being generated after its first chunk
_PATIENCE = 20.0  # seconds
E = TypeVar("E", bound=Exception)


class Weather(BaseModel):
    """The weather of a city, and nothing else: a random model would go on with properties of its own."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    warm: bool


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": Weather.model_json_schema()},
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


def closing_token() -> str:
    """Return the id of "}". A bias for this token makes a random model end an object that it would never end."""
    (token,) = httpx.post(f"{ROOT}/tokenize", json={"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    return str(token)


def aborted() -> float:
    """Return how many samples were aborted because their client disconnected."""
    lines = httpx.get(f"{ROOT}/metrics").text.splitlines()
    (line,) = [each for each in lines if each.startswith("vllm:request_success_total{") and '"abort"' in each]
    return float(line.split()[-1])


def refused(kind: type[E], call: Callable[[], object]) -> E:
    """Return the error of a call, which must be of this kind."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("the call was accepted")


def check_cancellation(begin: Callable[[], Callable[[], object]]) -> None:
    """Check that a request ends soon after its client has left. begin: sends it and returns the way to leave."""
    before = aborted()
    leave = begin()
    leave()
    deadline = time.monotonic() + _PATIENCE
    while aborted() == before:
        assert time.monotonic() < deadline, "the request did not end"
        time.sleep(0.05)


def report(client: str, checks: Mapping[str, Callable[[], object]]) -> NoReturn:
    """Run a client's checks; print the failures, and the results as a last line of JSON. Exit with 1 if any failed."""
    results = {}
    for call, check in checks.items():
        try:
            check()
            results[call] = True
        except Exception:  # noqa: BLE001 - the other checks go on
            print(f"-- {client}: {call}", file=sys.stderr)
            traceback.print_exc()
            results[call] = False
    print(json.dumps({"client": client, "results": results}))
    sys.exit(not all(results.values()))
