"""A required call: its form, and a grammar that accepts the text which the parser reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from speculant.errors import RequestError
from speculant.serving import (
    CallShape,
    ToolDelta,
    call_grammar,
    choose_tools,
    find_format,
    json_symbol,
    parse,
    read_tools,
)
from tests.examples import examples

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMS = [("hermes", None), ("llama3", None), ("mistral", None), ("mistral", "[TOOL_CALLS] [ARGS]")]


def shapes_of(choice: Any = "required", template: str | None = None, name: str = "json") -> list[CallShape]:
    """Return the forms of a required call of `TOOLS`."""
    found = find_format(template, None if template else name)
    assert found is not None
    return [found.shape(tool, template) for tool in choose_tools(read_tools(TOOLS), choice)]


def text_of(*calls: tuple[CallShape, object], between: str = "") -> str:
    first, last = calls[0][0].around
    texts = [shape.marker + shape.prefix + json.dumps(arguments) + shape.suffix for shape, arguments in calls]
    return first + between.join(texts) + last


@pytest.mark.parametrize(("name", "template"), FORMS)
@settings(max_examples=examples(50), deadline=None)
@given(city=st.text())
def test_a_parser_reads_its_format_s_shape(name: str, template: str | None, city: str) -> None:
    shapes, found = shapes_of("required", template, name), find_format(template, name)
    assert found is not None
    for shape, tool, arguments in zip(shapes, ("weather", "now"), ({"city": city}, {}), strict=True):
        assert parse(found(lambda: "id"), [text_of((shape, arguments))]) == [
            ToolDelta(0, "id", tool, json.dumps(arguments))
        ]


def test_an_unknown_format_is_a_json_object() -> None:
    (shape,) = shapes_of(NAMED)
    assert json.loads(text_of((shape, {"city": "Oslo"}))) == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert shape.schema == SCHEMA


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([], "required", "needs tools"),
        (TOOLS, "sometimes", "does not name a function"),
        (TOOLS, {"type": "function"}, "does not name a function"),
        (TOOLS, {"type": "function", "function": {"name": "wether"}}, "did you mean 'weather'"),
        ([{"type": "web_search"}], "required", "a tool of type 'web_search' is not a function"),
        ([{"type": "custom", "custom": {"name": "f"}}], "required", "takes free text, .*\n.*function with one text"),
        (["weather"], "required", "not a function"),
        ([{"type": "function", "function": {"name": ""}}], "required", "has the name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "required", "not a JSON schema"),
    ],
)
def test_invalid_tools_and_choices_are_refused(tools: Any, choice: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        choose_tools(read_tools(tools), choice)


def accepts(grammar: str, tokens: list[int]) -> bool:
    """Whether llguidance's grammar accepts these bytes (and 256, a special token) as a whole output."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(_bytes_tokenizer(llguidance), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def _bytes_tokenizer(llguidance: Any) -> Any:
    class Wrapped:
        eos_token_id, bos_token_id = 257, None
        tokens = (*(bytes([i]) for i in range(256)), b"[TOOL_CALLS]", b"<end>")
        special_token_ids = (256, 257)

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Wrapped()))


@pytest.mark.parametrize(("name", "template"), FORMS)
def test_a_grammar_accepts_only_calls(name: str, template: str | None) -> None:
    shapes = shapes_of("required", template, name)
    grammar = call_grammar(shapes, lambda marker: None)
    weather, now = shapes
    assert accepts(grammar, [*text_of((weather, {"city": "Osaka"})).encode()])
    assert accepts(grammar, [*text_of((now, {})).encode()])
    assert not accepts(grammar, [*text_of((weather, {"town": "x"})).encode()])
    assert not accepts(grammar, [*text_of((now, {})).encode()][:-1])
    assert not accepts(grammar, [*b"Hello"])


def test_json_may_be_written_in_place_of_calls() -> None:
    shapes = shapes_of("required", "<tool_call>")
    symbol = json_symbol({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}, compact=True)
    grammar = call_grammar(shapes, lambda marker: None, "\n", compact=True, instead=symbol)
    call = text_of((shapes[1], {}))
    for text in ('{"a":1}', call, f"{call}\n{call}"):
        assert accepts(grammar, [*text.encode()])
    for text in ('{"a":2}', f'{{"a":1}}\n{call}', "Hello"):
        assert not accepts(grammar, [*text.encode()])


def test_a_marker_that_is_a_token_is_written_as_the_token() -> None:
    (shape,) = shapes_of(NAMED, "[TOOL_CALLS]")
    grammar = call_grammar([shape], lambda marker: 256 if marker == "[TOOL_CALLS]" else None)
    rest = [*text_of((shape, {"city": "x"})).removeprefix("[TOOL_CALLS]").encode()]
    assert accepts(grammar, [256, *rest])
    assert not accepts(grammar, [*b"[TOOL_CALLS]", *rest])


@pytest.mark.parametrize(
    ("template", "between"),
    [("<tool_call>", "\n"), ("[TOOL_CALLS][ARGS]", ""), ("[TOOL_CALLS]", ", ")],
    ids=["hermes", "mistral", "mistral's list"],
)
def test_several_calls_may_be_written(template: str, between: str) -> None:
    found = find_format(template)
    assert found is not None
    assert found.separator(template) == between
    shapes = shapes_of("required", template)
    calls: list[tuple[CallShape, object]] = list(zip(shapes, ({"city": "x"}, {}), strict=True))
    one, more = (call_grammar(shapes, lambda marker: None, each) for each in (None, between))
    for call in calls:
        assert accepts(one, [*text_of(call).encode()])
        assert accepts(more, [*text_of(call).encode()])
    several = text_of(*calls, calls[0], between=between)
    assert accepts(more, [*several.encode()])
    assert not accepts(one, [*several.encode()])
    assert not accepts(more, [*(text_of(calls[0]) + between + "Hello").encode()])
    deltas = parse(found(), [several])
    assert [delta.name for delta in deltas if isinstance(delta, ToolDelta) and delta.name] == [
        "weather",
        "now",
        "weather",
    ]
