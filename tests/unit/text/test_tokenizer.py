"""Tokenizers of checkpoints, their vocabularies, and the bytes of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, decoders, models
from tokenizers.models import WordLevel

from speculant.errors import ModelError, PairError
from speculant.text import Tokenizer, compare_vocabularies, substitute_token, token_bytes
from tests.unit.text.tokenizers_for_tests import byte_level, metaspace_style, sentencepiece_style


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_decoding_returns_the_encoded_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("the naïve fox 👍")
    assert ids[0] == tokenizer.bos_id == tokenizer.vocab()["<s>"]
    assert tokenizer.encode("the naïve fox 👍", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "the naïve fox 👍"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>the naïve fox 👍"
    assert tokenizer.eos_id == tokenizer.vocab()["</s>"]
    assert tokenizer.vocab_size == len(tokenizer.vocab()) == 321
    assert tokenizer.apply_chat_template([]) == "<s>"


def test_settings_have_texts_and_no_file_names(folder: Path) -> None:
    settings = {"eos_token": {"content": "</s>"}, "name_or_path": "/home/me/x", "tokenizer_file": "/home/me/y", "a": 1}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    told = Tokenizer.from_folder(folder).settings
    assert (told["eos_token"], told["chat_template"], told["a"]) == ("</s>", None, 1)
    assert "/home" not in json.dumps(told)


def test_padded_rows_decode_to_nothing(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).decode([10_000]) == ""


def test_truncation_and_padding_of_the_file_are_switched_off(folder: Path) -> None:
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder)
    text = "quite a long text"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("")) == 1


def test_end_token_from_the_special_tokens_map(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_id == 1
    assert tokenizer.bos_id is None
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{", "can't be read"),
        ("tokenizer_config.json", "{", "JSON"),
    ],
)
def test_broken_files_are_named(folder: Path, file: str, content: str | None, reason: str) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    with pytest.raises(ModelError, match=reason):
        Tokenizer.from_folder(folder)


def test_sentencepiece_alone_is_refused_with_a_fix(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"sentencepiece(.|\n)*save_pretrained"):
        Tokenizer.from_folder(folder)


def swapped(first: str, second: str) -> Tokenizer:
    """A tokenizer of the same size with the same tokens, but the ids of two tokens are swapped."""
    content = json.loads(byte_level().backend.to_str())
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return Tokenizer(Backend.from_str(json.dumps(content)), {})


def test_vocabularies_of_the_same_size_may_differ() -> None:
    draft, target = swapped("a", "b"), byte_level()
    assert draft.vocab_size == target.vocab_size
    with pytest.raises(PairError) as caught:
        compare_vocabularies(target, draft)
    message = str(caught.value)
    a, b = target.vocab()["a"], target.vocab()["b"]
    assert f"id {a} is 'a' in the target, 'b' in the draft" in message
    assert f"id {b} is 'b' in the target, 'a' in the draft" in message
    assert "2 of 321 ids differ" in message
    assert "needs no model" in message


def test_tokens_that_one_side_lacks_are_returned() -> None:
    draft = byte_level()
    assert compare_vocabularies(byte_level(), draft) == frozenset()
    draft.backend.add_tokens(["<extra>", "<more>"])
    assert compare_vocabularies(byte_level(), draft) == frozenset({321, 322})
    assert compare_vocabularies(draft, byte_level()) == frozenset({321, 322})


def test_added_tokens_of_one_id_are_compared() -> None:
    draft, target = byte_level(), byte_level()
    draft.backend.add_tokens(["<extra>"])
    target.backend.add_tokens(["<other>"])
    with pytest.raises(PairError, match="id 321 is '<other>' in the target, '<extra>' in the draft"):
        compare_vocabularies(target, draft)


def test_vocabularies_without_a_common_id_are_refused() -> None:
    with pytest.raises(PairError, match="they share none"):
        compare_vocabularies(word_level({"a": 0}), word_level({"b": 1}))


def test_the_substitute_is_a_line_break_or_the_unknown_token() -> None:
    bytes_alone = byte_level()
    (line_break,) = bytes_alone.encode("\n", add_special_tokens=False)
    assert substitute_token(bytes_alone, ()) == line_break
    assert substitute_token(bytes_alone, {line_break}) == 0
    assert substitute_token(word_level({"a": 0, "?": 1, "b": 2}, unknown="?"), {0}) in (1, 2)


def word_level(vocab: dict[str, int], unknown: str = "?") -> Tokenizer:
    """A tokenizer of whole texts."""
    return Tokenizer(Backend(WordLevel(vocab, unk_token=unknown)), {})


# --- the bytes of tokens, in each spelling that tokenizers have


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
