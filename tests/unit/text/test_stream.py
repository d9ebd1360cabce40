"""Text as its tokens are committed: decoded piece by piece, and cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.text import (
    StopSearch,
    StopStrings,
    TextStream,
    Tokenizer,
    compile_stops,
)
from tests.examples import examples
from tests.timing import cpu_seconds, is_within
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, pieces_of, sentencepiece_style

TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece_style, metaspace_style)}
PIECES = ["👍🏽", "👨‍👩‍👧", "世界", "e\u0301", "ñ", "a", "ab ", " ", "\n", "ไทย", "\ufeff", "\U0010ffff"]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=6), max_size=12).map("".join)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]


@settings(deadline=None, max_examples=examples(150))
@given(text=texts)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_join_to_the_text_and_have_whole_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert any("\ufffd" in piece for piece in pieces) == ("\ufffd" in tokenizer.decode(ids))


@settings(deadline=None, max_examples=examples(250))
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_ids_join_to_their_decoding(kind: str, data: st.DataObject, skip: bool) -> None:
    """Including invalid bytes, special tokens and ids beyond the vocabulary, at lengths that drop old tokens."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=80))
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_character_of_four_tokens_appears_once() -> None:
    tokenizer = byte_level(vocab_size=258)  # bytes alone: no merges
    ids = tokenizer.encode("a👍b", add_special_tokens=False)
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "👍", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a👍", add_special_tokens=False)[:-1]
    *pieces, rest = pieces_of(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "\ufffd" in rest


def test_at_most_one_character_is_held_back() -> None:
    """The text of an ordinary token is returned with the token, without delay."""
    tokenizer = byte_level()
    ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
    assert all(pieces_of(tokenizer, ids)[:-1])


@pytest.mark.parametrize("text", ["a", "世", "\x80", "ab \n"])
def test_time_per_token_is_constant(tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoding has at most a fixed window of tokens, except for a run of bytes, which is decoded once."""
    decoded = []
    whole = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: decoded.append(len(ids)) or whole(ids, **options))
    ids = tokenizer.encode(text, add_special_tokens=False) * 300
    pieces_of(tokenizer, ids)
    assert sum(decoded) <= 20 * len(ids)


# --- a text stream returns to its checkpoint exactly: later tokens give the same text as in a new stream


STOPS = ("ab", "aé", "\ufffd\ufffd", "world", "a" * 9)


def a_stream(tokenizer: Tokenizer, min_tokens: int = 0) -> TextStream:
    params = SamplingParams(stop=STOPS, min_tokens=min_tokens, max_tokens=None)
    return TextStream(tokenizer, params, compile_stops(params.stop))


def push(stream: TextStream, ids: Sequence[int]) -> list[str | None]:
    return [stream.push(token_id) for token_id in ids]


def rest_of(stream: TextStream, ids: Sequence[int]) -> tuple[list[str | None], list[str], str, str]:
    """Push the remaining tokens; return all the text that the stream releases from here on."""
    found = push(stream, ids)
    pieces = [stream.pop() for _ in range(len(stream._pieces))]
    return found, pieces, stream.finish(), stream.text


@given(data=st.data(), min_tokens=st.integers(0, 30), popped=st.booleans())
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_rollback_is_exact(kind: str, data: st.DataObject, min_tokens: int, popped: bool) -> None:
    """It restores shortened windows, open runs of bytes and partly found strings."""
    tokenizer = TOKENIZERS[kind]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40)
    before, undone, after = data.draw(ids), data.draw(ids), data.draw(ids)
    stream, fresh = a_stream(tokenizer, min_tokens), a_stream(tokenizer, min_tokens)
    for each in (stream, fresh):
        push(each, before)
        for _ in before if popped else ():
            each.pop()
    stream.checkpoint()
    push(stream, undone)
    stream.rollback()
    assert stream.text == fresh.text
    assert rest_of(stream, after) == rest_of(fresh, after)


def test_rollback_without_a_checkpoint_is_to_the_beginning() -> None:
    tokenizer = byte_level()
    stream = a_stream(tokenizer)
    push(stream, tokenizer.encode("the fox wor"))
    stream.rollback()
    ids = tokenizer.encode("ld")
    assert rest_of(stream, ids) == rest_of(a_stream(tokenizer), ids)


def test_rollback_after_a_push_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    stream, fresh = a_stream(tokenizer), a_stream(tokenizer)
    for each in (stream, fresh):
        push(each, ids)
    stream.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "decode", lambda *_, **__: _fail())
        with pytest.raises(RequestError):
            stream.push(ids[0])
    stream.rollback()
    assert rest_of(stream, ids) == rest_of(fresh, ids)


def _fail() -> None:
    raise RequestError("no", "none")


# --- stop strings are found however the text is split, and no part of one is released


stops_over_ab = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces_over_ab = st.lists(st.text("abc", max_size=4), max_size=12)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search for the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    stop_checker = StopSearch(StopStrings(stops), include)
    results = [*(stop_checker.push(piece) for piece in pieces), stop_checker.flush()]
    return [result.text for result in results], results[-1].stop


@settings(deadline=None, max_examples=examples(400))
@given(stops=stops_over_ab, pieces=pieces_over_ab, include=st.booleans())
def test_any_split_of_the_text_agrees_with_the_oracle(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, stop = run(stops, pieces, include)
    assert ("".join(shown), stop) == oracle("".join(pieces), stops, include)


@settings(deadline=None, max_examples=examples(300))
@given(stops=stops_over_ab, pieces=pieces_over_ab)
def test_only_possible_beginnings_of_a_stop_are_held_back(stops: list[str], pieces: list[str]) -> None:
    stop_checker, seen, shown = StopSearch(StopStrings(stops)), "", ""
    for piece in pieces:
        seen += piece
        result = stop_checker.push(piece)
        shown += result.text
        if result.stop is not None:
            break
        beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
        assert len(seen) - len(shown) == max((len(b) for b in beginnings if seen.endswith(b)), default=0)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_time_is_linear_in_the_text() -> None:
    """The worst text for a naive search: it nearly completes the stop string at every character."""

    def search(length: int) -> Callable[[], None]:
        def push_all() -> None:
            stop_checker = StopSearch(StopStrings(["a" * 2000 + "b"]))
            for _ in range(length):
                stop_checker.push("a")

        return push_all

    assert is_within(12 * max(cpu_seconds(search(6_000)), 1e-3), search(24_000))
