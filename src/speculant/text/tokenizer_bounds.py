"""Bounds how much longer or shorter a tokenizer.json can make a text, from the settings of its components alone.

With n steps that each double a text, a byte becomes 2^n bytes, and the library aborts the process when memory runs out.
So the bounds of all steps are combined before the first text is encoded. Steps by Unicode's own tables (NFKD: up to 11
bytes per byte) lengthen a text only once, so the first step of each kind counts as 1.

A text beyond the context is refused before it is tokenised. A token stands for at most as many characters as it has
itself, unless a part of the tokenizer shortens texts. Parts that shorten them by a known factor count with it. With a
part that may drop characters, or may make one token of a run of any length, there is no bound.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from math import ceil, isinf, prod
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from speculant.errors import ModelError
from speculant.text.sentencepiece import BYTES

MOST_TIMES = 256  # bytes per byte; checkpoints in use have up to 20
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_UNICODE = {"NFD": 3, "NFC": 3, "NFKD": 11, "NFKC": 11, "Lowercase": 2, "BertNormalizer": 3, "Nmt": 3}
_MOST_UNICODE = 64  # bytes; the longest replacement in the character map of a SentencePiece model has 33
_COMPOSED = 4.0  # characters of the longest canonical decomposition in Unicode (U+1F82)
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace"})
_DIVIDING = frozenset({"Digits", "UnicodeScripts", "Split", "Punctuation"})  # they only divide a text into words
_DROPPED = float("inf")


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
        total = _total(steps_of(*components))
        if not total.factor + total.added <= MOST_TIMES:
            raise ModelError(
                f"the {name} of tokenizer.json can make a text {total.factor + total.added:.3g} times as long;"
                f" at most {MOST_TIMES} times is allowed",
                "use the tokenizer.json of the original checkpoint.",
            )


def steps_of(*components: Any) -> list[Mapping[str, Any]]:
    """Return the settings of a tokenizer's components and, in place of a component with parts, of its parts.

    None = there is no such component.
    """
    return [step for each in components if each for step in _inner(json.loads(each.__getstate__()))]


def _inner(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    parts = next((settings[key] for key in _LISTS if key in settings), None)
    if parts is None:
        yield settings
    else:
        for each in parts:
            yield from _inner(each)


def _total(steps: Sequence[Mapping[str, Any]]) -> LengthBound:
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


def characters_per_token(backend: Backend) -> int | None:
    """Return the most characters of a text for each of its tokens; None = there is no bound."""
    steps = steps_of(backend.normalizer, backend.pre_tokenizer)
    factor, added = prod(map(_shortening, steps)), backend.get_added_tokens_decoder().values()
    if isinf(factor) or any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _keeps_all(backend, steps, vocabulary.keys()):
        return None
    normalise = backend.normalizer.normalize_str if backend.normalizer else str
    found = (normalise(token.content) if token.normalized else token.content for token in added)
    return ceil(factor * max(map(len, [*vocabulary, *found])))


def _shortening(step: Mapping[str, Any]) -> float:
    """Return the most characters of which a normaliser or pre-tokenizer makes one."""
    match step:
        case {"type": "NFC" | "NFKC"}:
            return _COMPOSED
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if new:
            return max(1.0, len(old) / len(new))
    if step["type"] in _DIVIDING and step.get("behavior") != "Removed":
        return 1.0
    return 1.0 if step["type"] in _KEEPING else _DROPPED


def _keeps_all(backend: Backend, steps: Sequence[Mapping[str, Any]], vocabulary: Set[str]) -> bool:
    """Whether each character becomes a token or part of one, and unknown characters are not joined."""
    model = backend.model
    if not isinstance(model, BPE):
        return False
    if model.byte_fallback and vocabulary >= {*BYTES}:
        return True
    if model.unk_token is not None:
        return not model.fuse_unk
    changes = [step["type"] for step in steps if step["type"] not in _DIVIDING]
    return changes[-1:] == ["ByteLevel"] and vocabulary >= {*ByteLevel.alphabet()}
