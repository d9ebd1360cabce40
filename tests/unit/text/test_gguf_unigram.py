"""A tokenizer of SentencePiece's kind Unigram in a GGUF file gives the tokens of transformers' T5 tokenizer."""

from __future__ import annotations

import base64
import random
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers import T5Tokenizer

from speculant.errors import ModelError
from speculant.text.gguf_tokenizer import read_gguf_tokenizer
from speculant.text.sentencepiece import TokenType
from speculant.text.stream import IncrementalDetokenizer
from speculant.text.tokenizer import Tokenizer
from tests.texts import texts

KEY = "tokenizer.ggml"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ENDS = ["<pad>", "</s>", "<unk>"]
UNUSED = ["[PAD1]", "[PAD2]"]
# Written by SentencePiece: other spaces become " ", U+200B nothing, "\ufb01" "fi", "\xb2" 2, "\uff21" A, "\u2026" three
# dots, and "e" with U+0301 "\xe9".
CHARSMAP = zlib.decompress(base64.b64decode(
    "eNod03mwT3UUAPDz+9HwMq+/sjVZpoUsPbImbZKQXaFCQpbHCO2kei8UnvLKvnvi8QpZs2SXdVS2UhSVGpqpKNqVPted+cw5957z"
    "vXO/c883ikdE5YiM0hFXlo8oVSEiFZGTeUXE/khHbqOIebdEXOVZCXJqpyNPzZVTLLkfkY6cDtbJczMjCqzPkF+toSxl8Noox8om"
    "EdeIWuJaKlGRJfvTUbgp4nr5ddzIDVSlCtW4iRpU52ZqUossNpZMR22xLnWoTz0a0gBbiFtpzG3cwe3cxZ34rLibptxDM+6lOffR"
    "kha04n7a0Jp2tMX2oz0P0JFOPEgXOvMwD9GVR+hON3rwKD15jN70og+P04++ZNOfgQxgUNIzKx2DxScYyhCe4kme4Wme41mG8Twv"
    "MJwXGcHLvERu8jMZySuMZhSv8SpjGUMe43id8UzgDd4kn4m8xWQmMZUpTGcaM5nBbGYxlzkUMI+3mc9CFrCIQopYzLu8w9JkZniP"
    "ZaxgOauSGWMNq1nL+6xnHR+wgU3JzLCFzWxjKzvYzk4+ZDe72MuepDYmFfvEjyI5GxGf8DEHOcBhDvEpRzjKZ3zB5xznGF/xJSc5"
    "wTd8zSm+5Xu+4zRnl6TiB/FMUhuVilP5qfhJ/mNS42d+4Rzn+ZXfuMAf/M5f/Mk//M2/XOQS/8Xl85+VleXoNIm+2bGjKP4HqzuT"
    "5A=="
))  # fmt: skip
CHARACTERS = "abcdefghilmnoprstuvwx.,2A\xe9\u4e16"
SCORES = {
    "\u2581": -2.0, **{character: -6.0 - place / 9 for place, character in enumerate(CHARACTERS)},
    "\u2581the": -3.0, "he": -4.0, "llo": -5.0, "\u2581h": -4.5, "\u2581a": -3.5, "in": -4.2, "ing": -4.0, "th": -5.0,
    "fi": -6.5, "...": -6.0, "\u2581\u2581": -1.0, "naive": -9.0, "na\xefve": -9.0,
}  # fmt: skip


def metadata(more: Sequence[str] = (), **entries: Any) -> dict[str, Any]:
    """Return the metadata of a tokenizer, as llama.cpp's conversion writes it; more: tokens of bytes."""
    types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN]
    types += [TokenType.BYTE] * len(more) + [TokenType.NORMAL] * len(SCORES) + [TokenType.UNUSED] * len(UNUSED)
    found = {
        "model": "t5",
        "tokens": [*ENDS, *more, *SCORES, *UNUSED],
        "scores": [0.0] * (len(ENDS) + len(more)) + [*SCORES.values()] + [-10000.0] * len(UNUSED),
        "token_type": [int(each) for each in types],
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "precompiled_charsmap": [*CHARSMAP],
        **entries,
    }
    return {f"{KEY}.{name}": value for name, value in found.items() if value is not None}


def tokenizer(**entries: Any) -> Tokenizer:
    return Tokenizer(*read_gguf_tokenizer(metadata(**entries)))


def theirs(charsmap: bytes | None = CHARSMAP) -> Any:
    """Return transformers' tokenizer with the same tokens."""
    vocab = [(text, 0.0) for text in ENDS] + [*SCORES.items()]
    return T5Tokenizer(vocab=vocab, _spm_precompiled_charsmap=charsmap, extra_ids=0)


AWKWARD = ["", " ", "  ", "\n", "\n\n", " a  b ", "a\nb", "a\r\n b", "\ta", "hello  world ", "he\u0301", "\ufb01n"]
AWKWARD += ["x\xb2", "\U0001f44d\U0001f3fd", "\xa0a\u3000", "a\u200bb", "\u2026", "\u2581a", "[PAD1]"]
AWKWARD += ["</s>", "a</s> b", "<unk>", "<pad>a"]


@pytest.mark.parametrize("charsmap", [CHARSMAP, None], ids=["charsmap", "plain"])
def test_tokens_are_those_of_transformers(charsmap: bytes | None) -> None:
    ours, other = tokenizer(precompiled_charsmap=charsmap and [*charsmap]), theirs(charsmap)
    for text in [*AWKWARD, *texts(100, ENDS)]:
        ids = ours.encode(text)
        assert ids == other(text)["input_ids"], text
        assert ours.decode(ids) == other.decode(ids, skip_special_tokens=True)
        stream = IncrementalDetokenizer(ours)
        assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids)
    assert ours.vocab() == other.get_vocab()
    assert (ours.eos_id, ours.special_token("pad_token"), ours.special_ids) == (1, "<pad>", {0, 1, 2})


def test_a_stored_charsmap_may_be_signed() -> None:
    signed = [each - 256 if each > 127 else each for each in CHARSMAP]
    ours, other = tokenizer(precompiled_charsmap=signed), tokenizer()
    assert signed != [*CHARSMAP]
    assert ours.backend.to_str() == other.backend.to_str()


def slow_tokens(text: str, scores: Mapping[str, float]) -> list[str]:
    """Return the most likely tokens of a text. An unknown character has 10 less than the lowest score."""
    unknown, best = min(scores.values()) - 10, [(0.0, list[str]())]
    for end in range(1, len(text) + 1):
        found = []
        for start in range(end):
            piece = text[start:end]
            if piece in scores or len(piece) == 1:
                found.append((best[start][0] + scores.get(piece, unknown), [*best[start][1], piece]))
        best.append(max(found))
    return best[-1][1]


def bytes_of(character: str) -> tuple[str, ...]:
    """Return the tokens of a character's bytes."""
    return tuple(map("<0x{:02X}>".format, character.encode()))


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("trimmed", [True, False])
def test_each_switch_changes_spaces(prefixed: bool, trimmed: bool) -> None:
    ours = tokenizer(more=BYTES, precompiled_charsmap=None, add_space_prefix=prefixed, remove_extra_whitespaces=trimmed)
    chance = random.Random(3)
    for _ in range(200):
        text = "".join(chance.choices("  abehilnotx.\u4e16\u754c", k=chance.randint(1, 30)))
        text = re.sub("^  +|   +", "  ", text).removeprefix(" ")  # three marks can be divided in two ways
        kept = " ".join(text.split()) if trimmed else text
        marked = ("\u2581" if prefixed and kept else "") + kept.replace(" ", "\u2581")
        expected = [(token,) if token in SCORES else bytes_of(token) for token in slow_tokens(marked, SCORES)]
        found = [piece for pieces in expected for piece in pieces]
        ids = ours.encode(text, add_special_tokens=False)
        assert [ours.backend.id_to_token(each) for each in ids] == found
        assert ours.decode(ids) == kept


def test_unused_tokens_are_no_text() -> None:
    """Those at the end are rows of the model's table alone; others have ids, and do not lower the unknown score."""
    ours = tokenizer()
    assert ours.vocab_size == len(ENDS) + len(SCORES)
    tokens = [*ENDS, "[PAD0]", "a", "xy", "ya", "\u2581"]
    scores, types = [0.0, 0.0, 0.0, -10000.0, -30.0, -30.0, -1.0, -1.0], [3, 3, 2, 5, 1, 1, 1, 1]
    backend = read_gguf_tokenizer(metadata(tokens=tokens, scores=scores, token_type=types)).backend
    assert backend.encode("xya", add_special_tokens=False).ids == [7, 2, 6], "x is unknown, and has the score -40"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [({}, [0, 1]), ({"add_eos_token": False}, [0]), ({"add_bos_token": True, "bos_token_id": 0}, [0, 0, 1])],
)
def test_a_text_ends_with_the_end_token(entries: dict[str, Any], expected: list[int]) -> None:
    assert tokenizer(**entries).encode("<pad>") == expected


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [1.0]}, "scores for 1"),
        ({"scores": [float("nan")] * (len(SCORES) + 5)}, "not numbers"),
        ({"precompiled_charsmap": ["x"]}, "another type than int"),
        ({"precompiled_charsmap": [1, 2, 3]}, "can't be used"),
        ({"unknown_token_id": 10**6}, "unknown_token_id is 1000000"),
        ({"unknown_token_id": len(SCORES) + 3}, "can't be used"),
        ({"token_type": ["x"] * (len(SCORES) + 5)}, "another type than int"),
    ],
)
def test_damage_is_named(entries: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        tokenizer(**entries)
