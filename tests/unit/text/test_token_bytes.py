"""The bytes of tokens, in each spelling that tokenizers have."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from speculant.text.tokenizer import Tokenizer, token_bytes
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style

TEXT = " abé 世 naïve 👍🏽 <tool>\n\tab"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_style, metaspace_style])
def test_tokens_of_a_text_spell_it(make: type[Tokenizer]) -> None:
    tokenizer = make()  # type: ignore[call-arg]
    spelt = token_bytes(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(spelt[token] for token in tokens).decode().strip() == TEXT.strip()
    assert not spelt.keys() & tokenizer.special_ids
    assert len(spelt) + len(tokenizer.special_ids) == tokenizer.vocab_size


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.ByteLevel(), [b" a", b"##a", b"<0x0A>", b"\xe2\x96\x81a"]),
        (decoders.Metaspace(), [b"\xc4\xa0a", b"##a", b"<0x0A>", b" a"]),
        (decoders.WordPiece(), [b" \xc4\xa0a", b"a", b" <0x0A>", b" \xe2\x96\x81a"]),
        (decoders.ByteFallback(), [b"\xc4\xa0a", b"##a", b"\n", b"\xe2\x96\x81a"]),
        (decoders.BPEDecoder("a"), [b"\xc4\xa0 ", b"## ", b"<0x0A>", b"\xe2\x96\x81 "]),
        (None, [b" \xc4\xa0a", b" ##a", b" <0x0A>", b" \xe2\x96\x81a"]),
    ],
    ids=lambda each: type(each).__name__,
)
def test_each_decoder_has_its_spelling(decoder: Any, expected: list[bytes]) -> None:
    backend = Backend(models.WordLevel({"Ġa": 0, "##a": 1, "<0x0A>": 2, "▁a": 3}, unk_token="Ġa"))
    if decoder is not None:
        backend.decoder = decoder
    spelt = token_bytes(Tokenizer(backend, {}))
    assert [spelt[token] for token in range(4)] == expected
