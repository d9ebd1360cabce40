"""gpt-oss: channels become reasoning, content and calls, however the stream is split; forms begin after a header."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant.params import SamplingParams
from speculant.serving.errors import ApiError
from speculant.serving.openai.messages import MessageReader, joined_calls
from speculant.serving.openai.prompts import Prompt
from speculant.serving.openai.protocol import ChatBody, Message
from speculant.serving.openai.settings import reader_for, with_tools
from speculant.structured.grammars import Grammars
from speculant.text.tokenizer import Tokenizer
from tests.examples import examples
from tests.tagged import HARMONY, HARMONY_TEMPLATE, tokenizer_with_tags, write

CALL = '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "sea"}<|call|>'
THOUGHT = "<|channel|>analysis<|message|>Paris, I think.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Paris."
EARLY = " to=functions.f<|channel|>commentary json<|message|>{}"
SEA = [("look_up", '{"word": "sea"}')]
CASES: dict[str, tuple[str, tuple[str, str, list[tuple[str, str]]]]] = {
    "reasoned": (THOUGHT + FINAL, ("Paris, I think.", "Paris.", [])),
    "returned": (f"{THOUGHT}{FINAL}<|return|>", ("Paris, I think.", "Paris.", [])),
    "plain": (FINAL + "\n", ("", "Paris.\n", [])),
    "called": (THOUGHT + CALL, ("Paris, I think.", "", SEA)),
    "recipient first": (f"{THOUGHT}{EARLY}", ("Paris, I think.", "", [("f", "{}")])),
    "called in analysis": ('<|channel|>analysis to=functions.f code<|message|>{"a": 1}', ("", "", [("f", '{"a": 1}')])),
    "preamble": (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", ("", "I look.", SEA)),
    "two thoughts": (THOUGHT + THOUGHT + FINAL, ("Paris, I think.\nParis, I think.", "Paris.", [])),
    "preamble and answer": (f"{FINAL}<|end|><|start|>assistant{FINAL}", ("", "Paris.\nParis.", [])),
    "cut header": (THOUGHT + "<|channel|>fin", ("Paris, I think.", "", [])),
    "cut role": (THOUGHT[:-4], ("Paris, I think.", "", [])),
    "cut thought": (THOUGHT[:40], (THOUGHT[30:40], "", [])),
    "cut tag": (FINAL + "<|en", ("", "Paris.<|en", [])),
    "cut call": (CALL[:-12], ("", "", [("look_up", '{"word": "s')])),
    "no JSON": (CALL.replace("{", "word: "), ("", 'word: "word": "sea"}', [])),
    "wrong JSON": (CALL.replace('"sea"', "sea"), ("", "sea}", [("look_up", '{"word": ')])),
    "other recipient": ("<|channel|>commentary to=python<|message|>1 + 1<|call|>", ("", "1 + 1", [])),
    "no tags": ("Paris.", ("", "Paris.", [])),
    "nothing": ("", ("", "", [])),
}  # fmt: skip


def read(text: str, cuts: Sequence[int] = (), prompt: str = "<|start|>assistant", calls: bool = True) -> MessageReader:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look_up"}}]
    body = ChatBody(messages=[Message(role="user", content="hi")], tools=tools if calls else None)
    reader = reader_for(tokenizer_with_tags(True, HARMONY_TEMPLATE), body, None, has_form=False)(Prompt((), prompt))
    places = [0, *sorted(cuts), len(text)]
    parts = [reader.feed(text[i:j]) for i, j in itertools.pairwise(places)] + [reader.finish()]
    assert "".join(part.content for part in parts) == reader.message.content
    return reader


def essence(reader: MessageReader) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [each["function"] for each in joined_calls(reader.message.calls)]
    return reader.message.reasoning, reader.message.content, [(each["name"], each["arguments"]) for each in calls]


@pytest.mark.parametrize("case", CASES)
def test_channels_are_separated(case: str) -> None:
    text, expected = CASES[case]
    for cuts in (range(0), range(1, len(text)), range(3, len(text), 3)):
        reader = read(text, cuts)
        assert essence(reader) == expected
        assert reader.is_cut == (case in ("cut call", "wrong JSON"))


PIECES = [
    *HARMONY,
    "<|",
    "final",
    "analysis",
    "commentary",
    "assistant",
    " to=functions.f",
    "json",
    '{"a": 1}',
    "\n",
    "x",
]


@settings(max_examples=examples(500), deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=20), data=st.data())
def test_cuts_change_nothing(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole, cut = read(text), read(text, cuts)
    assert (essence(whole), whole.is_cut) == (essence(cut), cut.is_cut)


def test_reasoning_tokens_are_counted() -> None:
    tokens = ["<|channel|>", "analysis", "<|message|>", "I", " think", "<|end|>", "<|start|>", "assistant", FINAL]
    reader = read("".join(tokens), list(itertools.accumulate(map(len, tokens)))[:-1])
    assert reader.reasoning_tokens == 3, "both words, and the tag that ends them"


def test_without_tools_a_call_is_content() -> None:
    assert essence(read(THOUGHT + CALL, calls=False)) == ("Paris, I think.", '{"word": "sea"}', [])


def test_a_prompt_may_end_within_a_message() -> None:
    start = "<|start|>user<|message|>hi<|end|><|start|>assistant"
    for prompt, text, expected in (
        (f"{start}<|channel|>final<|message|>It is ", "Paris. ", ("", "Paris. ", [])),
        (f"{start}<|channel|>analysis<|message|>I think <", "so.", ("so.", "", [])),
        (f"{start}{FINAL}<|end|>", FINAL, ("", "Paris.", [])),
    ):
        assert essence(read(text, prompt=prompt)) == expected


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["yes", "no/never"]}, r"yes|no/never"),
    ({"regex": r"a/\/[bc]{2}|\n"}, r"a//[bc]{2}|\n"),
    ({"json": {"enum": [1, "x"]}}, r'1|"x"'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS)
def test_a_form_begins_after_the_header(form: dict[str, Any], pattern: str) -> None:
    tokenizer = tokenizer_with_tags(True, HARMONY_TEMPLATE)
    texts = [written(tokenizer, body_of(), random.Random(seed), form) for seed in range(12)]
    readers = [read(text) for text in texts]
    for reader in readers:
        assert re.fullmatch(pattern, reader.message.content)
    assert {bool(reader.message.reasoning) for reader in readers} == {False, True}, "the model may reason first"


def test_required_calls_follow_reasoning() -> None:
    tokenizer = tokenizer_with_tags(True, HARMONY_TEMPLATE)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("cut", "sew")]
    body, seen = body_of(tools=tools, tool_choice="required"), set()
    for seed in range(12):
        reader = read(written(tokenizer, body, random.Random(seed)))
        assert reader.message.content == ""
        (call,) = joined_calls(reader.message.calls)
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
        seen |= {call["function"]["name"], bool(reader.message.reasoning)}
    assert seen == {"cut", "sew", False, True}


def test_a_grammar_can_t_be_the_form() -> None:
    params = SamplingParams(structured_outputs={"grammar": 'start: "a"'})  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="channels"):
        with_tools(tokenizer_with_tags(True, HARMONY_TEMPLATE), params, body_of(), None)
    continued = body_of(continue_final_message=True)
    assert with_tools(tokenizer_with_tags(False, HARMONY_TEMPLATE), params, continued, None) == params


def test_tags_are_kept_in_the_text() -> None:
    for special in (False, True):
        params = with_tools(tokenizer_with_tags(special, HARMONY_TEMPLATE), SamplingParams(), body_of(), None)
        assert params.skip_special_tokens != special


def body_of(**fields: Any) -> ChatBody:
    return ChatBody(messages=[Message(role="user", content="hi")], **fields)


def written(tokenizer: Tokenizer, body: ChatBody, rng: random.Random, form: dict[str, Any] | None = None) -> str:
    """Return a random text of the form, as the server decodes it. Free text is short."""
    pytest.importorskip("llguidance")
    params = with_tools(tokenizer, SamplingParams(structured_outputs=form), body, None)  # type: ignore[arg-type]
    assert params.structured_outputs is not None
    constraint = Grammars(tokenizer, ()).compile(params.structured_outputs).result().constrain()
    (end,) = tokenizer.encode("<|end|>")

    def choose(allowed: list[int]) -> int:
        return end if end in allowed and rng.random() < 0.3 else rng.choice(allowed)

    return tokenizer.decode(write(constraint, tokenizer, rng, choose), params.skip_special_tokens)
