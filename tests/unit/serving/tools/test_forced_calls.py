"""Every text that the form of a forced call allows is read as calls, in each format and with any kind of tags."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

from speculant import plugins
from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.serving import (
    ApiError,
    ChatBody,
    Message,
    Prompt,
    finish_reason_of_calls,
    joined_calls,
    reader_for,
    with_allowed_tools,
    with_tools,
)
from speculant.structured import Grammars
from speculant.text import Tokenizer
from tests.examples import examples
from tests.tagged import tokenizer_with_tags, write

pytest.importorskip("llguidance")
PLAIN = "{{ messages }}"  # has no tools
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3": "<|start_header_id|>{{ tools }}<|python_tag|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral with arguments": "{{ tools }}[TOOL_CALLS][ARGS]",
    "harmony": "{{ tools }}<|channel|><|message|><|call|>",
    "granite": "{{ tools }}<|tool_call|>",
    "phi4": "{{ tools }}<|tool|><|/tool|>",
    "kimi": "{{ tools }}<|tool_calls_section_begin|>",
    "deepseek": "{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "deepseek's blocks": "{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>```json",
    "pythonic": "{{ tools }}<|tool_call_start|>",
    "pythonic without marks": "{{ tools }}[func_name1(a=1)]",
    "gemma4": '{{ tools }}<|tool_call><|"|>',
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=example>",
    "glm": "{{ tools }}<tool_call><arg_key>",
    "minimax": "{{ tools }}<minimax:tool_call><invoke name=",
    "deepseek_v32": "{{ tools }}\uff5cDSML\uff5cfunction_calls>",
    "unknown": "{{ tools }}<tools>[{}]</tools>",
    "no tools": PLAIN,
}
CLOSINGS = {  # of free text, where it is no token
    TEMPLATES["qwen3_coder"]: "</parameter>",
    TEMPLATES["minimax"]: "</parameter>",
    TEMPLATES["deepseek_v32"]: ("<", "/", "\uff5cDSML\uff5c", *"parameter>"),
}
LOOSE = {  # formats do not relate arguments to each other, or bound texts
    "any of": ("gemma4", "qwen3_coder", "glm", "minimax", "deepseek_v32", "pythonic", "pythonic without marks"),
    "texts": ("gemma4", "qwen3_coder", "glm", "minimax", "deepseek_v32"),
}
REFUSED = {
    "closed": ("gemma4", "qwen3_coder", "pythonic", "pythonic without marks")
}  # a name has a character of the format
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "empty": {},
    "open": {"type": "object"},
    "closed": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "</tool_call>": {"enum": ["<tool_call>", 1.5, None]}},
        "required": ["a", "</tool_call>"],
        "additionalProperties": False,
    },
    "or null": {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
    "any of": {"anyOf": [{"type": "object", "required": ["b"]}, {"type": "null"}], "properties": {"b": {"const": 1}}},
    "texts": {"type": "object", "properties": {"s": {"type": "string", "maxLength": 4}}, "required": ["s"]},
    "options of the library": {"type": "object", "x-guidance": {"item_separator": ";", "key_separator": "="}},
}


def body_of(names: list[str], schema: dict[str, Any] | None, choice: Any = "required", **fields: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    messages = [Message(role="user", content="hi")]
    return ChatBody(messages=messages, tools=tools, tool_choice=choice, **fields)


def sampled(tokenizer: Tokenizer, body: ChatBody, rng: random.Random, most: int) -> str:
    """Return a random text of the form, as the server decodes it. After `most` choices it closes open parts."""
    params = with_tools(tokenizer, SamplingParams(), body, None)
    assert params.structured_outputs is not None
    constraint = Grammars(tokenizer, ()).compile(params.structured_outputs).result().constrain()
    ends = [tokenizer.backend.token_to_id(tag) for tag in ("<|end|>", "</arg_value>", '<|"|>')]  # of free text
    quote, *others = (tokenizer.encode(character)[0] for character in '"</}]),:\n0')
    typed = CLOSINGS.get(tokenizer.chat_template or "", ())
    closing = [tokenizer.backend.token_to_id(piece) or tokenizer.encode(piece)[0] for piece in typed]
    left, shown = [most], functools.cache(lambda token: tokenizer.decode([token], skip_special_tokens=False))

    def choose(allowed: list[int]) -> int:
        left[0] -= 1
        if left[0] > 0 and rng.random() < 0.7:
            return rng.choice(allowed)
        within_text = len(allowed) > 100
        if within_text and closing:
            token = closing[-min(left[0], 0) % len(closing)]
            return token if token in allowed else rng.choice(allowed)
        tags = [] if within_text else [each for each in allowed if shown(each).startswith("</")]
        order = (*ends, quote, *others) if within_text else (tokenizer.eos_id, *ends, *tags, *others, quote)
        return next((token for token in order if token in allowed), None) or rng.choice(allowed)

    written = write(constraint, tokenizer, rng, choose, most=2000)
    assert len(written) < 2000, "the text does not end"
    return tokenizer.decode(written, skip_special_tokens=params.skip_special_tokens)


@pytest.mark.covering(1)
@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_all_texts_of_the_form_are_read_as_calls(template: str, schema: str, special: bool) -> None:
    tokenizer, rng = tokenizer_with_tags(special, TEMPLATES[template]), random.Random(f"{template} {schema}")
    for choice in ("required", {"type": "function", "function": {"name": "sew"}}):
        body = body_of(["cut", "sew"], SCHEMAS[schema], choice)
        if template in REFUSED.get(schema, ()):
            with pytest.raises(RequestError, match=r"</tool_call>"):
                with_tools(tokenizer, SamplingParams(), body, None)
            continue
        for _ in range(examples(3, least=1)):
            reader = reader_for(tokenizer, body, None, has_form=True)(Prompt(()))
            text = sampled(tokenizer, body, rng, most=15)
            for character in text:
                reader.feed(character)
            reader.finish()
            assert reader.message.content == "", text
            for call in joined_calls(reader.message.calls):
                assert call["function"]["name"] in (("cut", "sew") if choice == "required" else ("sew",))
                arguments = json.loads(call["function"]["arguments"])
                if template not in LOOSE.get(schema, ()):
                    jsonschema.validate(arguments, {**(SCHEMAS[schema] or {}), "type": "object"})
            assert reader.message.calls, text


@pytest.mark.parametrize(
    "template",
    [pytest.param(each, marks=[] if each == "mistral" else pytest.mark.slow) for each in TEMPLATES],
)
@settings(max_examples=examples(15), deadline=None)
@given(name=st.text(min_size=1, max_size=12), seed=st.integers())
def test_every_name_is_refused_or_read(template: str, name: str, seed: int) -> None:
    tokenizer, body = tokenizer_with_tags(False, TEMPLATES[template]), body_of([name], SCHEMAS["closed"])
    try:
        text = sampled(tokenizer, body, random.Random(seed), most=10)
    except RequestError:
        return
    reader = reader_for(tokenizer, body, None, has_form=True)(Prompt(()))
    reader.feed(text)
    reader.finish()
    assert {call["function"]["name"] for call in joined_calls(reader.message.calls)} == {name}, text


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
def test_a_tag_that_is_an_added_token_is_written_as_the_token(special: bool) -> None:
    """Qwen's tags are added tokens that are not special; no tokens could write them as literals."""
    tokenizer = tokenizer_with_tags(special, TEMPLATES["hermes"])
    form = with_tools(tokenizer, SamplingParams(), body_of(["cut"], None), None).structured_outputs
    constraint = Grammars(tokenizer, ()).compile(form).result().constrain()  # type: ignore[arg-type]
    written = write(constraint, tokenizer, random.Random(0), max)  # the end token follows all possible text
    ends = [tokenizer.backend.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>")]
    assert [written[0], written[-1]] == ends


def test_a_choice_of_allowed_tools_leaves_out_the_others() -> None:
    def allow(*names: str, mode: str = "required") -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for mode in ("auto", "required"):
        body = with_allowed_tools(body_of(["cut", "sew", "glue"], None, allow("glue", "cut", mode=mode)))
        assert [tool["function"]["name"] for tool in body.tools or ()] == ["cut", "glue"]
        assert body.tool_choice == mode
    assert finish_reason_of_calls(body) == "tool_calls"
    plain = body_of(["cut"], None, "auto")
    assert with_allowed_tools(plain) is plain
    with pytest.raises(RequestError, match="did you mean 'cut'"):
        with_allowed_tools(body_of(["cut"], None, allow("cat")))
    for wrong in (allow(mode="auto"), allow("cut", mode="none"), {"type": "allowed_tools"}, allow(*["cut"] * 129)):
        with pytest.raises(ApiError) as caught:
            with_allowed_tools(body_of(["cut"], None, wrong))
        assert caught.value.param == "tool_choice"


def test_a_model_may_write_calls_or_the_form() -> None:
    tokenizer = tokenizer_with_tags(False, TEMPLATES["hermes"])
    params = SamplingParams(structured_outputs={"json": SCHEMAS["closed"]})  # type: ignore[arg-type]
    body = body_of(["cut"], None, "auto")
    form = with_tools(tokenizer, params, body, None).structured_outputs
    constraint = Grammars(tokenizer, ()).compile(form).result().constrain()  # type: ignore[arg-type]
    (call,) = tokenizer.encode("<tool_call>")
    for token in (call, tokenizer.encode("{")[0]):
        assert constraint.mask(())[token // 32] >> (token % 32) & 1
    assert not constraint.mask(())[tokenizer.encode("H")[0] // 32] >> (tokenizer.encode("H")[0] % 32) & 1
    words = SamplingParams(structured_outputs={"choice": ["yes"]})  # type: ignore[arg-type]
    assert with_tools(tokenizer, words, body, None) == words, "other forms leave no calls"


def test_calls_are_compact_unless_white_space_is_allowed() -> None:
    tokenizer = tokenizer_with_tags(False, PLAIN)
    space, compact = tokenizer.encode(" ")[0], body_of(["cut"], SCHEMAS["closed"])
    flexible = body_of(["cut"], SCHEMAS["closed"], structured_outputs={"disable_any_whitespace": False})
    for body, blanks in ((compact, False), (flexible, True)):
        form = with_tools(tokenizer, SamplingParams(), body, None).structured_outputs
        constraint = Grammars(tokenizer, ()).compile(form).result().constrain()  # type: ignore[arg-type]
        constraint.advance(tokenizer.encode('{"name": "cut", "arguments": {'))
        assert bool(constraint.mask(())[space // 32] >> (space % 32) & 1) == blanks


@pytest.mark.parametrize("choice", [None, "auto"])
@pytest.mark.parametrize("template", ["unknown", "no tools"])
def test_an_error_about_tool_formats_names_the_flag(template: str, choice: str | None) -> None:
    tokenizer, body = tokenizer_with_tags(False, TEMPLATES[template]), body_of(["cut"], None, choice)
    with pytest.raises(ApiError, match="--tool-parser") as caught:
        with_tools(tokenizer, SamplingParams(), body, None)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
    for name in plugins.names("speculant.serving.tools"):
        assert name in str(caught.value)
        with_tools(tokenizer, SamplingParams(), body, name)


def test_finish_reason_of_calls_is_that_of_openai() -> None:
    named = {"type": "function", "function": {"name": "cut"}}
    reasons = [finish_reason_of_calls(body_of(["cut"], None, choice)) for choice in (None, "auto", "required", named)]
    assert reasons == ["tool_calls", "tool_calls", "tool_calls", "stop"]
