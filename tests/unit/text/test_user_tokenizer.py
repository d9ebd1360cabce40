"""The tokenizer for users gives the same results as that of transformers, by the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speculant.errors import RequestError
from speculant.models import resolve_source
from speculant.text import Tokenizer, UserTokenizer

TEXTS = ["Hello, world", "  äöü 🎈\n", ""]
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "?"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_source("demo")


@pytest.fixture(scope="module")
def ours(folder: Path) -> UserTokenizer:
    return UserTokenizer(Tokenizer.from_folder(folder), "demo")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_equal_those_of_transformers(ours: UserTokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        for skipped in (True, False):
            assert ours.decode(ids, skip_special_tokens=skipped) == theirs.decode(ids, skip_special_tokens=skipped)
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours(text) == {name: theirs(text)[name] for name in ("input_ids", "attention_mask")}


def test_encoding_several_texts_equals_transformers(ours: UserTokenizer, theirs: Any) -> None:
    expected = theirs(TEXTS)
    assert ours(TEXTS) == {name: expected[name] for name in ("input_ids", "attention_mask")}
    assert ours.batch_decode(expected["input_ids"]) == theirs.batch_decode(expected["input_ids"])


def test_vocabulary_and_special_tokens_equal_transformers(ours: UserTokenizer, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert set(ours.all_special_tokens) == set(theirs.all_special_tokens)
    for name in ("eos_token", "bos_token", "eos_token_id", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.pad_token_id is None) == (ours.pad_token is None)
    tokens = theirs.convert_ids_to_tokens([5, 9])
    assert ours.convert_ids_to_tokens([5, 9]) == tokens
    assert ours.convert_ids_to_tokens(5) == tokens[0]
    assert ours.convert_tokens_to_ids(tokens) == [5, 9]
    assert ours.convert_tokens_to_ids(tokens[1]) == 9


@pytest.mark.parametrize("begins", [True, False])
def test_templates_are_applied_as_in_transformers(ours: UserTokenizer, theirs: Any, begins: bool) -> None:
    named: dict[str, Any] = {"chat_template": TEMPLATE, "add_generation_prompt": begins}
    assert ours.apply_chat_template(TALK, tokenize=False, **named) == theirs.apply_chat_template(
        TALK, tokenize=False, **named
    )
    assert ours.apply_chat_template(TALK, return_dict=False, **named) == theirs.apply_chat_template(
        TALK, return_dict=False, **named
    )
    both = theirs.apply_chat_template(TALK, **named)
    assert ours.apply_chat_template(TALK, **named) == {name: both[name] for name in ("input_ids", "attention_mask")}


def test_continuing_a_message_is_refused(ours: UserTokenizer) -> None:
    with pytest.raises(RequestError, match=r"LLM\.chat"):
        ours.apply_chat_template(TALK, chat_template=TEMPLATE, continue_final_message=True)
