"""No text has fewer tokens than the bound says, whatever its tokenizer does to it."""

from __future__ import annotations

import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from speculant.text.tokenizer import Tokenizer
from speculant.text.tokenizer_bounds import characters_per_token
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

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
