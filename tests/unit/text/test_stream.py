"""A text stream returns to its checkpoint exactly: later tokens give the same text as in a new stream."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.text.stream import TextStream, compile_stops
from speculant.text.tokenizer import Tokenizer
from tests.unit.text.tokenizers_for_tests import byte_level, sentencepiece_style

TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece_style)}
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
