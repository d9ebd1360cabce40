"""Folders with SentencePiece files alone have the tokens of T5 and of Marian."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import ModelError
from speculant.text.sentencepiece import TokenType
from speculant.text.stream import IncrementalDetokenizer
from speculant.text.tokenizer import Tokenizer
from tests.texts import texts
from tests.unit.text.test_gguf_unigram import AWKWARD, CHARSMAP, ENDS, SCORES, slow_tokens, theirs

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
        stream = IncrementalDetokenizer(tokenizer)
        assert "".join(map(stream.push, found)) + stream.flush() == tokenizer.decode(found)
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
