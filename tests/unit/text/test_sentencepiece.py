"""SentencePiece's Unigram, in GGUF files and in its own files."""

from __future__ import annotations

import base64
import json
import random
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import T5Tokenizer

from speculant.errors import ModelError
from speculant.text import Tokenizer, TokenType, read_gguf_tokenizer
from tests.texts import texts
from tests.unit.text.tokenizers_for_tests import pieces_of

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
        assert "".join(pieces_of(ours, ids)) == ours.decode(ids)
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


# --- folders with SentencePiece files alone have the tokens of T5 and of Marian


NORMAL, CONTROL = TokenType.NORMAL, TokenType.CONTROL
T5 = [("<pad>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), ("<unk>", 0.0, TokenType.UNKNOWN)]
T5 += [(text, score, NORMAL) for text, score in SCORES.items()]
SOURCE = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL), *T5[3:]]
TARGET = {"\u2581hell": -3.0, "\u2581": -1.0, "\xdf": -4.0, "e\xdf": -2.0}  # tokens and scores of the target's model
SENTINELS = ["<extra_id_0>", "<extra_id_1>", {"content": "<extra_id_2>"}]


def field(number: int, value: int | bytes) -> bytes:
    """Encode a field of a message: a small whole number, or bytes."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def model(pieces: Sequence[tuple[str, float, int]], kind: int = 1, charsmap: bytes = CHARSMAP) -> bytes:
    """Return a SentencePiece file."""
    content = b"".join(
        field(1, field(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + field(3, type_))
        for text, score, type_ in pieces
    )
    rules = field(1, b"test") + field(2, charsmap) + field(3, 1) + field(4, 1) + field(5, 1)
    return content + field(2, field(3, kind) + field(4, 8000)) + field(3, rules)


def write_t5(folder: Path, content: bytes, **settings: Any) -> Path:
    (folder / "spiece.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_marian(folder: Path, ids: Mapping[str, Any]) -> Path:
    (folder / "source.spm").write_bytes(model(SOURCE))
    (folder / "target.spm").write_bytes(b"")  # it is not read
    (folder / "vocab.json").write_text(json.dumps(ids))
    return folder


def marian_ids() -> dict[str, int]:
    """Return the ids of all tokens, those of the target among them; the source's piece "fi" is in no vocabulary."""
    named = ["</s>", "<unk>", ">>de<<", *TARGET, *(text for text, *_ in reversed(T5[3:])), "<pad>"]
    return {text: place for place, text in enumerate(dict.fromkeys(each for each in named if each != "fi"))}


def test_tokens_of_t5_are_those_of_transformers(tmp_path: Path) -> None:
    ours, other = Tokenizer.load(write_t5(tmp_path, model(T5))), theirs()
    for text in [*AWKWARD, *texts(30, ENDS)]:
        assert ours.encode(text) == other(text)["input_ids"], text
    assert ours.vocab() == other.get_vocab()
    assert (ours.eos_id, ours.special_token("pad_token"), ours.chat_template) == (1, "<pad>", None)


def test_sentinels_of_t5_follow_its_pieces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_t5(tmp_path, model(T5), additional_special_tokens=[*SENTINELS, "<other>"]))
    assert tokenizer.encode("<extra_id_0><extra_id_2>") == [len(T5) + 2, len(T5), 1]
    assert tokenizer.vocab_size == len(T5) + 3
    stored = [*T5, ("<extra_id_0>", 0.0, TokenType.USER_DEFINED)]
    again = Tokenizer.load(write_t5(tmp_path, model(stored), additional_special_tokens=SENTINELS[:1]))
    assert again.encode("<extra_id_0>") == [len(T5), 1]


def test_tokens_of_marian_have_the_ids_of_its_vocabulary(tmp_path: Path) -> None:
    ids = marian_ids()
    tokenizer = Tokenizer.load(write_marian(tmp_path, ids))
    scores = {text: score for text, score in SCORES.items() if text != "fi"}
    for text in ("the hello in", "  a\nthing ...", "he\u0301llo\u3000the fin", "nothing at all"):
        marked = [f"\u2581{word}".replace("e\u0301", "\xe9") for word in text.split()]
        expected = [token for word in marked for token in slow_tokens(word, scores)]
        found = tokenizer.encode(text)
        assert found == [*(ids[token] for token in expected), ids["</s>"]]
        assert tokenizer.decode(found) == " ".join(text.replace("e\u0301", "\xe9").split())
        assert "".join(pieces_of(tokenizer, found)) == tokenizer.decode(found)
    assert tokenizer.vocab() == ids
    assert (tokenizer.eos_id, tokenizer.special_token("pad_token")) == (0, "<pad>")


def test_the_target_s_tokens_stand_for_unknown_characters(tmp_path: Path) -> None:
    """As in transformers, a character that the source's model lacks has the target's token, not a longer one."""
    ids = marian_ids()
    tokenizer = Tokenizer.load(write_marian(tmp_path, ids))
    named = {place: text for text, place in ids.items()}

    def tokens(text: str) -> list[str]:
        return [named[each] for each in tokenizer.encode(text)[:-1]]

    assert tokens("hell") == ["\u2581", "he", "l", "l"]
    assert tokens("e\xdf") == ["\u2581", "e", "\xdf"]
    assert tokens("a\u6f22\u5b57") == ["\u2581a", "<unk>"]
    assert tokens(">>de<< a") == [">>de<<", "\u2581a"]
    assert tokens("<pad></s>") == ["<pad>", "</s>"]


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has no pieces"),
    "cut": (model(T5)[:-30], "no usable SentencePiece file"),
    "cut in a number": (model(T5) + b"\x80", "no usable SentencePiece file"),
    "groups": (b"\x0b", "no usable SentencePiece file"),
    "no text": (field(1, field(3, 1)), "no usable SentencePiece file"),
    "BPE": (model(T5, kind=2), "a model of the kind 2, and only Unigram"),
    "twice": (model([*T5, T5[-1]]), "a token twice"),
    "no end": (model(T5[2:]), "no token </s>"),
    "infinite": (model([*T5, ("xx", float("inf"), NORMAL)]), "scores that are not numbers"),
    "charsmap": (model(T5, charsmap=b"123"), "no usable tokenizer"),
    "text": (model(T5).replace(b"naive", b"na\xffve"), "no usable SentencePiece file"),
}


@pytest.mark.parametrize(("content", "reason"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer.load(write_t5(tmp_path, content))
    assert "spiece.model" in str(caught.value)


@pytest.mark.parametrize("ids", [{"a": "x"}, {"a": 1}, {"</s>": 0, "a": 0}, {"</s>": 0}, {}, {"a": 0, "b": None}])
def test_vocabularies_without_ids_are_refused(tmp_path: Path, ids: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"vocab\.json"):
        Tokenizer.load(write_marian(tmp_path, ids))


def test_a_tokenizer_json_takes_precedence(tmp_path: Path) -> None:
    write_t5(tmp_path, model(T5))
    tokenizer = Tokenizer.load(tmp_path)
    other = write_marian(tmp_path, marian_ids())
    (other / "spiece.model").unlink()
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).vocab() == tokenizer.vocab()
