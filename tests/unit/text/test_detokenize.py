"""Streamed text is the whole text in pieces, and no piece contains part of a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from speculant.text import IncrementalDetokenizer, Tokenizer
from tests.examples import examples
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece_style, metaspace_style)}
PIECES = ["👍🏽", "👨‍👩‍👧", "世界", "e\u0301", "ñ", "a", "ab ", " ", "\n", "ไทย", "\ufeff", "\U0010ffff"]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@settings(deadline=None, max_examples=examples(150))
@given(text=texts)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_text_and_have_whole_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in tokenizer.decode(ids))


@settings(deadline=None, max_examples=examples(250))
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_ids_join_to_their_decoding(kind: str, data: st.DataObject, skip: bool) -> None:
    """Including invalid bytes, special tokens and ids beyond the vocabulary, at lengths that drop old tokens."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_character_of_four_tokens_appears_once() -> None:
    tokenizer = byte_level(vocab_size=258)  # bytes alone: no merges
    ids = tokenizer.encode("a👍b", add_special_tokens=False)
    assert stream(tokenizer, ids) == ["a", "", "", "", "👍", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👍", add_special_tokens=False)[:-1]
    *pieces, rest = stream(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "\ufffd" in rest


def test_at_most_one_character_is_held_back() -> None:
    """The text of an ordinary token is returned with the token, without delay."""
    tokenizer = byte_level()
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert all(stream(tokenizer, ids)[:-1])


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("fox"), tokenizer.eos_id]
    assert "".join(stream(tokenizer, ids)) == "fox"
    assert "".join(stream(tokenizer, ids, skip_special_tokens=False)) == "<s>fox</s>"


@pytest.mark.parametrize("text", ["a", "世", "\x80", "ab \n"])
def test_time_per_token_is_constant(tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoding has at most a fixed window of tokens, except for a run of bytes, which is decoded once."""
    decoded = []
    whole = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or whole(ids, **options))
    ids = tokenizer.encode(text, add_special_tokens=False) * 300
    stream(tokenizer, ids)
    assert sum(decoded) <= 20 * len(ids)
