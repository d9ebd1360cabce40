"""A request on its way to a replica, with the text by which Ray's router finds the replica."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from speculant.serving.http.clients import key_digest
from speculant.serving.process import InsideRequest

MOST_CHARACTERS = 8192  # of a text; the router keeps texts, and compares them character by character
_TAG = 8  # characters of a client's key or salt


@dataclass(frozen=True)
class RoutedRequest:
    """A request. `prompt`: its text for the router, which is never empty."""

    prompt: str
    request: InsideRequest


def routed(request: InsideRequest, api_key: str | None) -> RoutedRequest:
    """Return a request with its text: the beginning of its prompt, after what separates prefix caches.

    Prompts of different API keys, users or salts share no cache, so their texts differ from the first character.
    """
    try:
        body = json.loads(request.body) if request.body else {}
    except (ValueError, RecursionError):  # the replica refuses it
        body = {}
    body = body if isinstance(body, dict) else {}
    given = body.get("cache_salt")
    parts = (api_key, request.user, given if isinstance(given, str) else None)  # the replica refuses another type
    tag = key_digest(ascii(parts))[:_TAG] if any(parts) else ""
    return RoutedRequest((tag + text_of(body))[:MOST_CHARACTERS] or request.path, request)


def text_of(body: dict[str, Any]) -> str:
    """Return the text of a body's messages, prompt or input: the same for the same prefix of a conversation."""
    for name in ("messages", "prompt", "input"):
        if (value := body.get(name)) is not None:
            parts = [body[name] for name in ("instructions",) if isinstance(body.get(name), str)]
            _collect(value, parts)
            return "\n".join(parts)
    return ""


def _collect(value: Any, parts: list[str]) -> None:
    """Append the texts within a prompt, in their order. Token ids become text."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | int):
            parts.append(str(item))
        elif isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, dict):
            waiting.extend(reversed([item[name] for name in _TEXTS if name in item]))


_TEXTS = ("role", "text", "content", "encoder_prompt", "decoder_prompt", "prompt_token_ids", "prompt")
