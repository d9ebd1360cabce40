"""Bounds on the texts and the tokens that a tokenizer can make."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from speculant.errors import ModelError
from speculant.text import MOST_TIMES, Tokenizer, characters_per_token, check_length_bounds
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

TEXTS = ["", "a", "a b", "aaaa", "é", "中ﷺ", "``''", "ab" * 20]


def character_map(*replacements: bytes) -> bytes:
    """Return a character map of SentencePiece: the size of the trie, the trie, and texts that end with a zero."""
    return struct.pack("<II", 4, 0) + b"".join(text + b"\0" for text in replacements)


def many(count: int, make: Any) -> Any:
    return normalizers.Sequence([make] * count)


SAFE = {
    "llama": many(1, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "clip": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("\\s+"), " "), normalizers.Lowercase()]),
    "bert": normalizers.BertNormalizer(),
    "shorter": many(50, normalizers.Replace("ab", "a")),
    "same": many(50, normalizers.Replace("a", "b")),
    "removed": many(50, normalizers.Replace(Regex("x?"), "")),
}
WITH_MAP = {
    "albert": normalizers.Sequence(
        [
            *(normalizers.Replace("``", '"'), normalizers.Replace("''", '"'), normalizers.NFKD()),
            *(normalizers.StripAccents(), normalizers.Lowercase(), normalizers.Precompiled(character_map(b"x" * 33))),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    ),
    "t5": normalizers.Sequence(
        [normalizers.Precompiled(character_map(b"x" * 33)), normalizers.Replace(Regex(" {2,}"), "▁")]
    ),
}
BOMBS = {
    "replace": many(4, normalizers.Replace("a", "a" * 1000)),
    "once": normalizers.Replace("a", "a" * 1000),
    "doubling": many(30, normalizers.Replace("a", "aa")),
    "empty matches": many(30, normalizers.Replace(Regex("(?=a)"), "a")),
    "empty text": many(30, normalizers.Replace("", "a")),
    "nested": normalizers.Sequence([many(6, normalizers.Replace("a", "aa"))] * 6),
    "prepend": many(2, normalizers.Prepend("a" * 1000)),
    "prepend and replace": normalizers.Sequence([normalizers.Prepend("a" * 20), normalizers.Replace("a", "a" * 20)]),
    "bytes": many(30, normalizers.ByteLevel()),
    "compatibility": many(30, normalizers.Sequence([normalizers.Replace("\u0627", "\ufdfa"), normalizers.NFKD()])),
    "character map": normalizers.Precompiled(character_map(b"x", b"y" * 1000)),
}
OTHER_BOMBS = {
    "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 30),
    "decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 30),
    "decoder ": decoders.Sequence([decoders.BPEDecoder(suffix="")] * 30),
    "decoder  ": decoders.Sequence([decoders.CTC(word_delimiter_token="")] * 30),
    "post_processor": processors.TemplateProcessing(single="s $A" + " s $A" * 300, special_tokens=[("s", 0)]),
}


def with_parts(**parts: Any) -> Backend:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    for name, component in parts.items():
        setattr(backend, name.strip(), component)
    return backend


@pytest.mark.parametrize("name", SAFE)
def test_a_component_of_common_checkpoints_is_accepted(name: str) -> None:
    backend = with_parts(normalizer=SAFE[name])
    check_length_bounds(backend)
    for text in TEXTS:
        size = len(backend.normalizer.normalize_str(text).encode())
        assert size <= MOST_TIMES * max(1, len(text.encode()))


@pytest.mark.parametrize("name", WITH_MAP)
def test_a_common_character_map_is_accepted(name: str) -> None:
    check_length_bounds(with_parts(normalizer=WITH_MAP[name]))


@pytest.mark.parametrize("make", [byte_level, sentencepiece_style, metaspace_style])
def test_common_tokenizers_are_accepted(make: Any) -> None:
    check_length_bounds(make().backend)


@pytest.mark.parametrize("name", BOMBS)
def test_a_normalizer_that_multiplies_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="normalizer and pre_tokenizer of tokenizer.json can make a text"):
        check_length_bounds(with_parts(normalizer=BOMBS[name]))


@pytest.mark.parametrize("name", OTHER_BOMBS)
def test_other_components_that_multiply_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"{name.strip()} of tokenizer.json can make a text"):
        check_length_bounds(with_parts(**{name: OTHER_BOMBS[name]}))


def test_normalizer_and_pre_tokenizer_count_together() -> None:
    parts = {
        "normalizer": many(5, normalizers.ByteLevel()),
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 5),
    }
    for name, component in parts.items():
        check_length_bounds(with_parts(**{name: component}))
    with pytest.raises(ModelError):
        check_length_bounds(with_parts(**parts))


def test_a_tokenizer_that_multiplies_is_refused_at_load(tmp_path: Path) -> None:
    content = json.loads(byte_level().backend.to_str())
    content["normalizer"] = json.loads(BOMBS["replace"].__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="can make a text [0-9]e\\+12 times as long"):
        Tokenizer.from_folder(tmp_path)


# --- no text has fewer tokens than the bound says, whatever its tokenizer does to it


RUNS = ["a", "ab", " ", "  ", "\n", "the quick", "<tool>", "<s>", "é", "e\u0301", "世", "👍🏽", "\u1f82", "ab ab", "▁"]
texts = st.lists(st.sampled_from(RUNS) | st.text(max_size=4), max_size=12).map("".join) | st.builds(
    str.__mul__, st.sampled_from(RUNS), st.integers(1, 60)
)


def composing() -> Tokenizer:
    """Qwen's kind: composed characters, then words, then bytes."""
    backend = byte_level().backend
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(r"\w+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return Tokenizer(backend, {})


def replacing() -> Tokenizer:
    """Texts that become shorter by a known factor."""
    backend = sentencepiece_style().backend
    backend.normalizer = normalizers.Sequence([normalizers.Replace("the quick", "ab"), normalizers.Lowercase()])
    return Tokenizer(backend, {})


BOUNDED = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece_style,
    "composing": composing,
    "replacing": replacing,
}


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    tokenizer = BOUNDED[name]()
    most = characters_per_token(tokenizer.backend)
    assert most is not None

    @given(texts)
    def check(text: str) -> None:
        assert len(tokenizer.encode(text, add_special_tokens=False)) * most >= len(text)

    check()


def test_the_bound_is_no_higher_than_needed() -> None:
    """The longest token reaches it, and a composed character takes as many others as the bound allows."""
    vocabulary = {each: place for place, each in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "aa", "aaa"])}
    backend = Backend(models.BPE(vocabulary, [("a", "a"), ("aa", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert characters_per_token(backend) == 3
    assert len(backend.encode("aaa", add_special_tokens=False).ids) == 1
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(0x110000)) == 4


def changed(**parts: Any) -> Backend:
    backend = parts.pop("backend", byte_level().backend)
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def with_added(**settings: Any) -> Backend:
    backend = byte_level().backend
    backend.add_tokens([AddedToken("<mask>", **settings)])
    return backend


def without_fallback(**settings: Any) -> Backend:
    return Backend(models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], **settings))


UNBOUNDED = {
    "spaces joined": lambda: metaspace_style().backend,
    "spaces at the ends": lambda: changed(normalizer=normalizers.Strip()),
    "accents": lambda: changed(normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "a text removed": lambda: changed(normalizer=normalizers.Replace("a", "")),
    "words": lambda: changed(pre_tokenizer=pre_tokenizers.Whitespace()),
    "split removed": lambda: changed(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "mark replaced after bytes": lambda: changed(normalizer=normalizers.ByteLevel(), pre_tokenizer=metaspace()),
    "left spaces of a token": lambda: with_added(lstrip=True),
    "right spaces of a token": lambda: with_added(rstrip=True),
    "unknown characters dropped": without_fallback,
    "unknown characters joined": lambda: without_fallback(unk_token="<unk>", fuse_unk=True),
    "unknown words": lambda: Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    "unigram": lambda: Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
}


def metaspace() -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme="never")


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_that_shorten_texts_have_no_bound(name: str) -> None:
    assert characters_per_token(UNBOUNDED[name]()) is None


def test_single_unknown_characters_are_tokens() -> None:
    assert characters_per_token(without_fallback(unk_token="<unk>")) == len("<unk>")


def test_the_embedded_model_has_a_bound() -> None:
    folder = Path(__file__).parents[3] / "src" / "speculant" / "assets" / "demo" / "target"
    assert Tokenizer.from_folder(folder).characters_per_token == 64


@pytest.mark.parametrize("make", [byte_level, sentencepiece_style, metaspace_style, composing])
def test_long_texts_have_the_tokens_of_the_short_way(make: Any) -> None:
    """Long texts are encoded and decoded by other calls of the library, which release the interpreter's lock."""
    tokenizer: Tokenizer = make()
    text = "the quick größer  世界 👍🏽<s> ab\n" * 400
    for special in (False, True):
        ids = tokenizer.encode(text, special)
        assert ids == tokenizer.backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.decode(ids, special) == tokenizer.backend.decode(ids, skip_special_tokens=special)
    assert len(ids) > 4096 < len(text)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_read(way: str) -> None:
    """No thread is made to give the interpreter's lock away here: others run only if the library releases it."""
    tokenizer, turns, over = byte_level(), [0], threading.Event()
    text = "the quick größer  世界 👍🏽<s> ab\n" * 3000
    ids = tokenizer.encode(text)
    read = partial(tokenizer.encode, text) if way == "encode" else partial(tokenizer.decode, ids)

    def take_turns() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)

    interval, other = sys.getswitchinterval(), threading.Thread(target=take_turns)
    sys.setswitchinterval(1000)
    try:
        other.start()
        assert any(_turns_during(read, turns) for _ in range(20))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join()


def _turns_during(read: Callable[[], object], turns: list[int]) -> int:
    before = turns[0]
    read()
    return turns[0] - before
