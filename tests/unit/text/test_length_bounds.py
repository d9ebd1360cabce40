"""A tokenizer.json that multiplies a text is refused before it is used."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from speculant.errors import ModelError
from speculant.text.tokenizer import Tokenizer
from speculant.text.tokenizer_bounds import MOST_TIMES, check_length_bounds
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
