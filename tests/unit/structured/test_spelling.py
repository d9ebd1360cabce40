"""Texts that name added tokens are spelled with other tokens; only `<[id]>` in a grammar is the token."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from speculant.structured.constraint import Grammar, ReasonedConstraint, Reasoning
from speculant.structured.grammars import Grammars
from speculant.structured.spec import StructuredOutputs
from speculant.text.tokenizer import Tokenizer
from tests.tagged import tokenizer_with_tags, write

pytest.importorskip("llguidance")
CALL, OBJECT = {"const": "<tool_call>x"}, {"type": "object"}
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "common prefix": ({"choice": ["<tool_call>x", "<tool_call>y"]}, re.compile("<tool_call>[xy]").fullmatch),
    "no common prefix": ({"choice": ["<tool_call>x", "plain"]}, re.compile("<tool_call>x|plain").fullmatch),
    "one text": ({"choice": ["a<think></think>"]}, "a<think></think>".__eq__),
    "brackets": ({"choice": ["[ARGS]a", "[ARGS]b"]}, re.compile(r"\[ARGS\][ab]").fullmatch),
    "regex": ({"regex": "(<tool_call>two words){1,2}</tool_call>"}, re.compile("(<.*s)</tool_call>").fullmatch),
    "json": ({"json": CALL}, lambda text: json.loads(text) == CALL["const"]),
    "keys": (
        {"json": {"properties": {"<think>": CALL}, "required": ["<think>"], "additionalProperties": False, **OBJECT}},
        lambda text: json.loads(text)["<think>"] == CALL["const"],
    ),
    "lark": (
        {"grammar": 'start: "<tool_call>" (A | B) "</tool_call>"\nA: "a"\nB: "b"'},
        re.compile("<.*[ab]<.*").match,
    ),
    "the end's name": ({"choice": ["<end>x", "<end>y"]}, re.compile("<end>[xy]").fullmatch),
    "not ascii": ({"choice": ["é<tool_call>ü", "é<tool_call>日"]}, re.compile("é<tool_call>[ü日]").fullmatch),
}


@pytest.fixture(scope="module", params=[False, True], ids=["added", "special"])
def tagged(request: pytest.FixtureRequest) -> Tokenizer:
    return tokenizer_with_tags(request.param)


def compiled(tokenizer: Tokenizer, **form: Any) -> Grammar:
    return Grammars(tokenizer, ()).compile(StructuredOutputs(**form)).result()


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_text_that_names_an_added_token_can_be_written(tagged: Tokenizer, form: str) -> None:
    """If a forced name of an added token were encoded as this token, the grammar would forbid it."""
    grammar, rng = compiled(tagged, **FORMS[form][0]), random.Random(form)
    for _ in range(6):
        written = write(grammar.constrain(), tagged, rng)
        assert FORMS[form][1](tagged.decode(written)), "also where special tokens are skipped"


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_can_follow_reasoning(tagged: Tokenizer, form: str) -> None:
    start, end = map(tagged.backend.token_to_id, ("<think>", "</think>"))
    constraint = ReasonedConstraint(compiled(tagged, **FORMS[form][0]), Reasoning(start, end, opened=True))
    thought = [*tagged.encode("hm"), end]
    constraint.advance(thought)
    assert FORMS[form][1](tagged.decode(write(constraint, tagged, random.Random(form))))


def test_a_token_id_in_a_grammar_is_that_token(tagged: Tokenizer) -> None:
    start, end = map(tagged.backend.token_to_id, ("<tool_call>", "</tool_call>"))
    grammar = compiled(tagged, grammar=f'start: <[{start}]> "<tool_call>" <[{end}]>')
    written = write(grammar.constrain(), tagged, random.Random(0))
    assert (written[0], written[-1]) == (start, end)
    assert not {start, end} & {*written[1:-1]}
    assert tagged.decode(written[1:-1]) == "<tool_call>"


def test_other_texts_are_encoded_as_the_tokenizer_does(tagged: Tokenizer) -> None:
    forced = compiled(tagged, choice=["plain tool <tools>"]).constrain().forced()
    assert forced == tagged.encode("plain tool <tools>")
