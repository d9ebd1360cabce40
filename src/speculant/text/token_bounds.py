"""Bounds how few tokens a text can have, so that a text beyond the context is refused before it is tokenised.

A token stands for at most as many characters as it has itself, unless a part of the tokenizer shortens texts. Parts
that shorten them by a known factor count with it. With a part that may drop characters, or may make one token of a run
of any length, there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil, isinf, prod
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from speculant.text.length_bounds import steps_of

_COMPOSED = 4.0  # characters of the longest canonical decomposition in Unicode (U+1F82)
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace"})
_DIVIDING = frozenset({"Digits", "UnicodeScripts", "Split", "Punctuation"})  # they only divide a text into words
_DROPPED = float("inf")


def characters_per_token(backend: Backend) -> int | None:
    """Return the most characters of a text for each of its tokens; None = there is no bound."""
    parts = [json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part]
    steps = [step for part in parts for step in steps_of(part)]
    factor, added = prod(map(_shortening, steps)), backend.get_added_tokens_decoder().values()
    if isinf(factor) or any(token.lstrip or token.rstrip for token in added) or not _keeps_all(backend, steps):
        return None
    normalise = backend.normalizer.normalize_str if backend.normalizer else str
    found = (normalise(token.content) if token.normalized else token.content for token in added)
    return ceil(factor * max(map(len, [*backend.get_vocab(with_added_tokens=False), *found])))


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


def _keeps_all(backend: Backend, steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each character becomes a token or part of one, and unknown characters are not joined."""
    model, vocabulary = backend.model, backend.get_vocab(with_added_tokens=False)
    if not isinstance(model, BPE):
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    if model.unk_token is not None:
        return not model.fuse_unk
    changes = [step["type"] for step in steps if step["type"] not in _DIVIDING]
    return changes[-1:] == ["ByteLevel"] and all(each in vocabulary for each in ByteLevel.alphabet())
