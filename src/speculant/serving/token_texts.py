"""Log-probabilities in OpenAI's two shapes, and the text and bytes of single tokens that they need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

from speculant.serving.wire import Deferred
from speculant.text.stream import TokenOffsets
from speculant.text.tokenizer import Tokenizer, byte_table, fallback_byte
from speculant.types import Logprob, Logprobs

LOWEST = -9999.0  # in place of minus infinity, which JSON can't hold; OpenAI's value
_CACHED = 16_384


class TokenTexts:
    """The text and the bytes of tokens, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.backend.get_added_tokens_decoder())
        is_byte_level = any(step["type"] == "ByteLevel" for step in tokenizer.decoder_steps)
        self._bytes_of = byte_table() if is_byte_level else None
        self.of = lru_cache(_CACHED)(self._of)

    def places(self, skip_special_tokens: bool, start: int = 0) -> TokenOffsets:
        """Return where the texts of the tokens of an answer begin; start: characters before the answer."""
        return TokenOffsets(self._tokenizer, skip_special_tokens, start)

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text and bytes. Part of a character is written as OpenAI does: `bytes:` and hex codes."""
        data = self._bytes(token)
        if data is None:
            return self._tokenizer.decode_alone(token) or "", None
        try:
            return data.decode("utf-8"), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def _bytes(self, token: int) -> bytes | None:
        raw = self._tokenizer.backend.id_to_token(token)
        if raw is None:
            return None
        if token not in self._added:
            if self._bytes_of is not None and all(character in self._bytes_of for character in raw):
                return bytes(self._bytes_of[character] for character in raw)
            if (byte := fallback_byte(raw)) is not None:
                return byte
        text = self._tokenizer.decode_alone(token)
        return None if text is None else text.encode("utf-8", "replace")


def chat_logprob(texts: TokenTexts, token: int, entry: Logprobs, top: int) -> dict[str, Any]:
    """Return one token's entry of a chat's `logprobs.content`, with its `top` most likely alternatives; -1 = all."""
    best = sorted(entry.items(), key=lambda each: each[1].rank)[: top if top >= 0 else None]
    alternatives = [_alone(texts, other, value) for other, value in best]
    return {**_alone(texts, token, entry[token]), "top_logprobs": alternatives}


def _alone(texts: TokenTexts, token: int, value: Logprob) -> dict[str, Any]:
    text, data = texts.of(token)
    return {"token": text, "logprob": finite(value.logprob), "bytes": data}


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[int], entries: Sequence[Logprobs | None], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return a completion's `logprobs`. offsets: where each token's text begins in the answer.

    entries: None for the first token of a prompt, which has no log-probability.
    """
    pairs = list(zip(tokens, entries, strict=True))
    return {
        "tokens": [texts.of(token)[0] for token in tokens],
        "token_logprobs": [None if entry is None else finite(entry[token].logprob) for token, entry in pairs],
        "top_logprobs": [None if entry is None else Deferred(partial(_by_text, texts, entry)) for entry in entries],
        "text_offset": list(offsets),
    }


def _by_text(texts: TokenTexts, entry: Logprobs) -> dict[str, float]:
    """Return alternatives by their texts, the most likely first. Of several with one text, the most likely counts."""
    values: dict[str, float] = {}
    for token, value in sorted(entry.items(), key=lambda each: each[1].rank):
        values.setdefault(texts.of(token)[0], finite(value.logprob))
    return values


def prompt_logprobs(entries: Sequence[Logprobs | None] | None) -> list[Deferred | None] | None:
    """Return a prompt's log-probabilities in vLLM's shape: by token id, None for the first token."""
    if entries is None:
        return None
    return [None if entry is None else Deferred(partial(_by_id, entry)) for entry in entries]


def _by_id(entry: Logprobs) -> dict[str, Any]:
    return {
        str(token): {"logprob": finite(value.logprob), "rank": value.rank, "decoded_token": value.decoded_token}
        for token, value in entry.items()
    }


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(value, LOWEST)
