"""The bytes that each token of a tokenizer adds to a text, however its vocabulary spells them.

Byte-level BPE (GPT-2) spells a byte as one character and a space as U+0120. SentencePiece spells a space as U+2581, and
with byte fallback a byte as a token such as <0xE4>. WordPiece marks tokens that no space precedes by ##.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from speculant.text.tokenizer import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_table() -> dict[str, int]:
    """Return the byte for each character of byte-level tokenizers (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = byte_table()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token of byte fallback, `<0x0A>`, stands for; None = another token."""
    hit = _FALLBACK.fullmatch(token) if len(token) == 6 else None
    return bytes.fromhex(hit[1]) if hit else None


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the bytes of every token that is not special, by id: those that it adds within a text.

    Spaces that a decoder strips from the ends of a whole text are kept. A step of the decoder that is not in the
    module's list leaves a token as it is spelt.
    """
    special, found = tokenizer.special_ids, dict[int, bytes]()
    left = {token_id: token for token, token_id in tokenizer.vocab().items() if token_id not in special}
    for step in _steps(tokenizer.decoder_settings):
        match step:
            case {"type": "ByteLevel"}:
                alphabet = _BYTES.keys()
                found |= {each: bytes(map(_BYTES.__getitem__, t)) for each, t in left.items() if alphabet >= {*t}}
            case {"type": "ByteFallback"}:
                found |= {each: byte for each, t in left.items() if (byte := fallback_byte(t)) is not None}
            case _:
                change = _change(step)
                left = {each: change(t) for each, t in left.items()}
    return {each: t.encode("utf-8", "replace") for each, t in left.items()} | found


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder in order. Without a decoder, tokens are joined by spaces."""
    if decoder is None:
        yield {"type": "WordPiece", "prefix": ""}
    elif decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _steps(each)
    else:
        yield decoder


def _change(step: Mapping[str, Any]) -> Callable[[str], str]:
    """Return how a step changes the text of a token."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return lambda token: token.replace(old, new)
        case {"type": "Metaspace", "replacement": str(old)} | {"type": "BPEDecoder", "suffix": str(old)} if old:
            return lambda token: token.replace(old, " ")
        case {"type": "WordPiece", "prefix": str(mark)}:
            return lambda token: token[len(mark) :] if mark and token.startswith(mark) else " " + token
    return lambda token: token
