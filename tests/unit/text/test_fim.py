"""Marks for filling in the middle are found by family or by name, and texts never become marks."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, strategies as st

from speculant.text import FAMILIES, FimMarks, Hole, PlainEncoder, Tokenizer, fim_prompt, find_fim, read_gguf_tokenizer
from tests.gguf_tokenizers import metadata_of
from tests.unit.text.tokenizers_for_tests import SETTINGS, byte_level, metaspace_style, sentencepiece_style

HOLE = Hole("fox(", ")", [("x.py", "lazy")])
QWEN = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>"]
STARCODER = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"]
GEMMA = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"]
DEEPSEEK = ["<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"]
FILE, TEXT = "x.py\nlazy\n", "# x.py\nlazy\nfox("


def _named(marks: list[str]) -> list[str]:
    """The prompt of HOLE with marks for a repository and its files."""
    pre, suf, mid, repo, file = marks[:5]
    return [repo, "project\n", file, FILE, file, "untitled\n", pre, "fox(", suf, ")", mid]


CASES: dict[str, tuple[Callable[[], Tokenizer], list[str], list[str]]] = {
    "Qwen2.5-Coder": (byte_level, QWEN, ["<s>", *_named(QWEN)]),
    "StarCoder 2": (byte_level, STARCODER, ["<s>", *_named(STARCODER)]),
    "CodeGemma": (byte_level, GEMMA, ["<s>", GEMMA[3], FILE, GEMMA[3], "untitled\n", *_named(QWEN)[6:]]),
    "Granite 4": (byte_level, GEMMA[:3], ["<s>", GEMMA[0], TEXT, GEMMA[1], ")", GEMMA[2]]),
    "DeepSeek-Coder": (byte_level, DEEPSEEK, ["<s>", DEEPSEEK[0], TEXT, DEEPSEEK[1], ")", DEEPSEEK[2]]),
    "CodeLlama": (sentencepiece_style, ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"],
                  ["▁<PRE>", TEXT, "▁<SUF>", ")", "▁<MID>"]),
    "Codestral": (metaspace_style, ["[PREFIX]", "[SUFFIX]"], ["[SUFFIX]", ")", "[PREFIX]", TEXT]),
}  # fmt: skip


def made(family: str) -> tuple[Tokenizer, FimMarks]:
    tokenizer = CASES[family][0]()
    tokenizer.backend.add_special_tokens(CASES[family][1])
    marks = find_fim(Tokenizer(tokenizer.backend, {"bos_token": "<s>", "unk_token": "<unk>"}))
    assert marks is not None
    return tokenizer, marks


def shown(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return special tokens by name, and the texts between them."""
    name = tokenizer.backend.id_to_token
    groups = groupby(tokens, lambda token: token if token in {*tokenizer.special_ids} else None)
    return [text for key, each in groups for text in ([tokenizer.decode([*each])] if key is None else map(name, each))]


@pytest.mark.parametrize("family", CASES)
def test_a_family_is_found_and_its_prompt_formed(family: str) -> None:
    tokenizer, marks = made(family)
    assert shown(tokenizer, fim_prompt(tokenizer, marks, HOLE).tokens) == CASES[family][2]
    assert {*map(tokenizer.backend.token_to_id, CASES[family][1])} <= {*marks.ends}
    without = fim_prompt(tokenizer, marks, Hole("fox(", ")"), begins=False).tokens
    names = [each for each in CASES[family][2] if each in CASES[family][1][:3]]
    assert [each for each in shown(tokenizer, without) if each in CASES[family][1]] == names


@pytest.mark.parametrize("family", CASES)
def test_a_text_with_marks_never_becomes_one(family: str) -> None:
    tokenizer, marks = made(family)
    names = [*CASES[family][1], "</s>"]
    for text in (*names, "".join(names), f"fox {names[0]} lazy{names[1]}{names[1]}\n"):
        text = text.replace("▁", " ") if tokenizer.backend.token_to_id("▁a") is not None else text
        tokens = fim_prompt(tokenizer, marks, Hole(text, text, [(text, text)])).tokens
        known = [*filter(tokenizer.special_ids.__contains__, tokens)]
        assert known == [*filter(tokenizer.special_ids.__contains__, fim_prompt(tokenizer, marks, HOLE).tokens)]
        encode = PlainEncoder(tokenizer, marks.ends)
        assert tokenizer.decode(encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("marks", [[], QWEN[:2], STARCODER[1:], ["<PRE>", "<SUF>", "<MID>"]])
def test_other_vocabularies_have_no_marks(marks: list[str]) -> None:
    tokenizer = byte_level()
    tokenizer.backend.add_special_tokens(marks)
    assert find_fim(tokenizer) is None


@pytest.mark.parametrize("keys", [("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id"),
                                  ("prefix_token_id", "suffix_token_id", "middle_token_id")])  # fmt: skip
def test_a_gguf_file_names_its_marks(keys: tuple[str, ...]) -> None:
    metadata: dict[str, Any] = metadata_of(json.loads(byte_level().backend.to_str()), SETTINGS)
    metadata |= {f"tokenizer.ggml.{key}": place for key, place in zip(keys, (2, 3, 4), strict=True)}
    tokenizer = Tokenizer(*read_gguf_tokenizer(metadata))
    found = find_fim(tokenizer)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (2, 3, 4)


def test_settings_name_marks_before_a_family() -> None:
    tokenizer = byte_level()
    tokenizer.backend.add_special_tokens(QWEN)
    roles = {"prefix_token": "a", "suffix_token": {"content": "b"}, "middle_token": "c"}
    found = find_fim(Tokenizer(tokenizer.backend, roles))
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == tuple(map(tokenizer.backend.token_to_id, "abc"))


words = st.integers(0, 30).map(lambda count: "fox" + "x" * count)


@given(words, words, st.lists(st.tuples(words, words), max_size=3), st.integers(8, 80))
def test_a_prompt_keeps_what_is_next_to_the_cursor(prefix: str, suffix: str, files: Any, most: int) -> None:
    tokenizer, marks = MADE
    tokens, is_cut = fim_prompt(tokenizer, marks, Hole(prefix, suffix, files), most)
    whole = fim_prompt(tokenizer, marks, Hole(prefix, suffix, files)).tokens
    assert len(tokens) <= most
    assert is_cut == (tokens != whole)
    assert is_cut == (len(whole) > most)
    before, after = (tokenizer.encode(text, False) for text in (prefix, suffix))
    start, middle = tokens.index(marks.prefix), tokens.index(marks.suffix)
    kept_before, kept_after = tokens[start + 1 : middle], tokens[middle + 1 : -1]
    assert before[len(before) - len(kept_before) :] == kept_before
    assert after[: len(kept_after)] == kept_after
    if (kept_before, kept_after) != (before, after):
        assert len(kept_before) + len(kept_after) == most - 4
        assert start == 1  # other files come last
        assert len(kept_after) >= min(len(after), (most - 4) // 4)


MADE = made("Qwen2.5-Coder")


def test_the_newest_file_is_kept() -> None:
    tokenizer, marks = MADE
    files = [("old", "quick"), ("new", "lazy")]
    whole = fim_prompt(tokenizer, marks, Hole("fox", files=files)).tokens
    text = tokenizer.decode(fim_prompt(tokenizer, marks, Hole("fox", files=files), len(whole) - 3).tokens)
    assert "lazy" in text
    assert "quick" not in text
    assert fim_prompt(tokenizer, marks, Hole("fox", files=files), 8) == (
        fim_prompt(tokenizer, marks, Hole("fox")).tokens, True)  # fmt: skip


def test_every_family_has_a_name() -> None:
    assert all(names.prefix and names.suffix for names in FAMILIES.values())
