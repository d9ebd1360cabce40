"""Bounds how much longer the components of a tokenizer.json can make a text, from their settings alone.

With n steps that each double a text, a byte becomes 2^n bytes, and the library aborts the process when memory runs out.
So the bounds of all steps are combined before the first text is encoded. Steps by Unicode's own tables (NFKD: up to 11
bytes per byte) lengthen a text only once, so the first step of each kind counts as 1.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from speculant.errors import ModelError

MOST_TIMES = 256  # bytes per byte; checkpoints in use have up to 20
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_UNICODE = {"NFD": 3, "NFC": 3, "NFKD": 11, "NFKC": 11, "Lowercase": 2, "BertNormalizer": 3, "Nmt": 3}
_MOST_UNICODE = 64  # bytes; the longest replacement in the character map of a SentencePiece model has 33


class LengthBound(NamedTuple):
    """A text of n bytes becomes at most factor * n + added bytes; for post-processors, tokens."""

    factor: float = 1.0
    added: float = 0.0

    def then(self, step: LengthBound) -> LengthBound:
        """Return the bound of this step and a following one together."""
        return LengthBound(self.factor * step.factor, self.added * step.factor + step.added)


def check_length_bounds(backend: Backend) -> None:
    """Raise ModelError if a part of a tokenizer can turn one byte into more than MOST_TIMES bytes or tokens."""
    parts = {
        "normalizer and pre_tokenizer": (backend.normalizer, backend.pre_tokenizer),
        "post_processor": (backend.post_processor,),
        "decoder": (backend.decoder,),
    }
    for name, components in parts.items():
        steps = [step for each in components if each for step in steps_of(json.loads(each.__getstate__()))]
        total = _total(steps)
        if not total.factor + total.added <= MOST_TIMES:
            raise ModelError(
                f"the {name} of tokenizer.json can make a text {total.factor + total.added:.3g} times as long;"
                f" at most {MOST_TIMES} times is allowed",
                "use the tokenizer.json of the original checkpoint.",
            )


def steps_of(component: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a component's parts; of one without parts, its own."""
    inner = next((component[key] for key in _LISTS if key in component), None)
    if inner is None:
        yield component
    else:
        for each in inner:
            yield from steps_of(each)


def _total(steps: list[Mapping[str, Any]]) -> LengthBound:
    total, seen = LengthBound(), set[str]()
    for step in steps:
        own = _unicode_factor(step)
        if own is None:
            total = total.then(_bound(step))
        else:
            total = total.then(LengthBound(own if own > _MOST_UNICODE or step["type"] in seen else 1))
            seen.add(step["type"])
    return total


def _unicode_factor(step: Mapping[str, Any]) -> int | None:
    """Return the most bytes that a step by character tables makes of one; None = another kind of step."""
    if step["type"] != "Precompiled":
        return _UNICODE.get(step["type"])
    raw = base64.b64decode(step["precompiled_charsmap"])
    strings = raw[4 + int.from_bytes(raw[:4], "little") :]  # after the size and the trie: texts that end with a zero
    return max(map(len, strings.split(b"\0")))


def _bound(step: Mapping[str, Any]) -> LengthBound:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return _replaced(old, new)
        case {"type": "Replace", "content": str(new)}:  # a regular expression may match an empty text
            return _replaced("", new)
        case {"type": "Prepend", "prepend": str(new)} | {"type": "Metaspace", "replacement": str(new)}:
            return LengthBound(_size(new) if step["type"] == "Metaspace" else 1, _size(new))
        case {"type": "ByteLevel"}:  # a character of two bytes for each byte, and a space before the text
            return LengthBound(2, 1)
        case {"type": "BPEDecoder", "suffix": str(old)} | {"type": "CTC", "word_delimiter_token": str(old)}:
            return _replaced(old, " ")
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(special)}:
            names = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
            return LengthBound(len(pieces) - len(names), sum(len(special[name]["ids"]) for name in names))
    return LengthBound(added=2)  # at most the two marks around a text


def _replaced(old: str, new: str) -> LengthBound:
    """Return the bound for replacing each occurrence of a text. An empty one occurs before and after each byte."""
    return LengthBound(max(1.0, _size(new) / _size(old))) if old else LengthBound(1 + _size(new), _size(new))


def _size(text: str) -> int:
    return len(text.encode("utf-8"))
