"""Tool calls are separated from text, however the stream is split, in the format that a template writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from speculant.errors import ConfigError
from speculant.serving import Delta, TextDelta, ToolDelta, ToolParser, find_format, parse, unknown_formats
from speculant.text import find_tags
from tests.examples import examples
from tests.tagged import HARMONY_TEMPLATE, tokenizer_with_tags
from tests.timing import cpu_seconds, is_within

FORMATS = ["hermes", "llama3", "mistral"]
PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_", '{"name": "f", "arguments": {"a": [1, "x"]}}'],
    "llama3": ["<|python_tag|>", "<|python", ";", '{"name": "f", "parameters": {"a": {"b": null}}}'],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f[ARGS]{}", '[{"name": "f", "arguments": {}}', ",", "]"],
}
SHARED = ["{", "}", '"', "\\", '"name"', '"arguments"', ":", '"f"', "{}", " ", "\n", "-1.5e3", "tru", "é", "😀", "text"]


def parser_of(name: str, new_id: Callable[[], str] | None = None) -> ToolParser:
    found = find_format(None, name)
    assert found is not None
    return found(new_id)


def read(name: str, text: str, cuts: Sequence[int] = ()) -> list[Delta]:
    """Parse a text in pieces; ids count up."""
    places = [0, *sorted(cuts), len(text)]
    numbers = itertools.count()
    parser = parser_of(name, lambda: f"id{next(numbers)}")
    return joined(parse(parser, [text[i:j] for i, j in itertools.pairwise(places)]))


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Join adjacent deltas, as a client does."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ToolDelta) and isinstance(last, ToolDelta) and last.index == delta.index:
            assert delta.id is delta.name is None, "only the first piece has them"
            result[-1] = ToolDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            assert isinstance(delta, TextDelta) or (delta.id and delta.name), "the first piece has both"
            result.append(delta)
    return result


def call(index: int, name: str, arguments: str) -> ToolDelta:
    return ToolDelta(index, f"id{index}", name, arguments)


CASES = [
    ("hermes", "Just text, 1 < 2 and <tool_cal.", [TextDelta("Just text, 1 < 2 and <tool_cal.")]),
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "é\\n", "b": [-1.5e+3, {}]}}\n</tool_call>\n',
        [TextDelta("I look."), call(0, "f", '{"a": "é\\n", "b": [-1.5e+3, {}]}')],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>\n<tool_call>{"name":"g","arguments":{}}',
        [call(0, "f", '{"a": 1}'), call(1, "g", "{}")],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":1}}', [call(0, "f", '{"a":1}')]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g","arguments":{}}</tool_call>',
        [
            call(0, "f", "{}"),
            call(1, "g", "{}"),
        ],
    ),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"cut', [call(0, "f", '{"a":"cut')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}', [call(0, "f", '{"a":"x\\ny"}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call> so', [call(0, "f", "{}"), TextDelta(" so")]),
    ("llama3", ' {"name": "f", "parameters": {"a": 1}}', [call(0, "f", '{"a": 1}')]),
    (
        "llama3",
        '{"name":"f","parameters":{}}; {"name":"g","parameters":{}}\n',
        [call(0, "f", "{}"), call(1, "g", "{}")],
    ),
    (
        "llama3",
        'Sure. <|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        [TextDelta("Sure."), call(0, "f", "{}")],
    ),
    ("llama3", 'See: {"name":"f","parameters":{}}', [TextDelta('See: {"name":"f","parameters":{}}')]),
    ("llama3", '{"name": "Bob", "age": 3}', [TextDelta('{"name": "Bob", "age": 3}')]),
    ("llama3", "<|python_tag|>print(1)", [TextDelta("<|python_tag|>print(1)")]),
    (
        "mistral",
        'Ok [TOOL_CALLS] [{"name":"f","arguments":{"a":[]}}, {"arguments":{},"name":"g","id":"abcdefghi"}]',
        [TextDelta("Ok"), call(0, "f", '{"a":[]}'), call(1, "g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a":1}[TOOL_CALLS]g{}', [call(0, "f", '{"a":1}'), call(1, "g", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", [ToolDelta(0, "abcdefghi", "f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name":"f","arguments":{}}, no]', [call(0, "f", "{}"), TextDelta(", no]")]),
    ("json", "Just text.", [TextDelta("Just text.")]),
    ("json", '{"name":"f","arguments":{}} so', [call(0, "f", "{}"), TextDelta(" so")]),
]
MALFORMED = [
    ("hermes", "<tool_call>oops</tool_call>"),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "name": "g", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call> more'),
    ("hermes", '<tool_call>{"arguments": {"a": 1'),
    ("hermes", '<tool_call>{"na'),
    ("hermes", "text </tool_call> text"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS] "),
    ("mistral", "[TOOL_CALLS]f[ARGS]text"),
    ("llama3", '{"title": "x"}'),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_read(name: str, text: str, expected: list[Delta]) -> None:
    assert read(name, text) == expected
    assert read(name, text, range(1, len(text))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_cut_until_its_arguments_end(name: str) -> None:
    text = written(name, [("f", '{"a": {"b": "}"}}'), ("g", "{}")])
    for length in range(len(text) + 1):
        parser = parser_of(name)
        calls = [delta for delta in joined(parse(parser, [text[:length]])) if isinstance(delta, ToolDelta)]
        complete = [each.arguments for each in calls] in ([], ['{"a": {"b": "}"}}'], ['{"a": {"b": "}"}}', "{}"])
        assert parser.is_cut != complete, text[:length]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_malformed_calls_are_text(name: str, text: str) -> None:
    assert read(name, text) == [TextDelta(text)]
    assert read(name, text, range(1, len(text))) == [TextDelta(text)]


@pytest.mark.parametrize("bad", ["01", "1.", "-", "1e", "+1", "nul", "tru,", "'x'", "[1,]", "[1 2]", '"\\x"', "{1:2}"])
def test_arguments_end_at_the_first_wrong_character(bad: str) -> None:
    text = f'<tool_call>{{"name":"f","arguments":{{"a":{bad}}}}}</tool_call>'
    first, second = read("hermes", text)
    assert isinstance(first, ToolDelta)
    assert isinstance(second, TextDelta)
    assert text.endswith(first.arguments + second.text)
    with pytest.raises(ValueError, match=r"Expecting|Invalid|Illegal|Extra|delimiter"):
        json.loads(f'{{"a":{bad}}}')


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(1000), deadline=None)
@given(data=st.data())
def test_cuts_change_nothing(name: str, data: st.DataObject) -> None:
    pieces = st.sampled_from([*PIECES[name], *SHARED]) | st.text(max_size=3)
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert read(name, text, cuts) == read(name, text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(100), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["f", "get_x"]), st.dictionaries(st.text(), json_values, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    escaped=st.booleans(),
    data=st.data(),
)
def test_any_arguments_are_read(
    name: str, calls: list[tuple[str, dict[str, Any]]], escaped: bool, data: st.DataObject
) -> None:
    texts = [(each, json.dumps(arguments, ensure_ascii=escaped)) for each, arguments in calls]
    text = "Hello.\n" * (name != "llama3") + written(name, texts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    found = [delta for delta in read(name, text, cuts) if isinstance(delta, ToolDelta)]
    assert found == [call(i, each, arguments) for i, (each, arguments) in enumerate(texts)]


def written(name: str, calls: list[tuple[str, str]]) -> str:
    objects = [f'{{"name": "{each}", "arguments": {arguments}}}' for each, arguments in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return "; ".join(objects) if name == "llama3" else f"[TOOL_CALLS][{', '.join(objects)}]"


def test_text_is_streamed_at_once() -> None:
    parser = parser_of("hermes")
    assert [parser.feed(piece) for piece in ("Hi", " there <", "b", " <tool", "box")] == [
        [TextDelta("Hi")],
        [TextDelta(" there")],
        [TextDelta(" <b")],
        [],
        [TextDelta(" <toolbox")],
    ]


def test_arguments_are_streamed_at_once() -> None:
    parser = parser_of("hermes", lambda: "id0")
    fed = [parser.feed(piece) for piece in ('<tool_call>{"name": "f",', ' "arguments": {', '"a', '": 1', "}", "}")]
    assert fed == [
        [],
        [ToolDelta(0, "id0", "f", "{")],
        [ToolDelta(0, None, None, '"a')],
        [ToolDelta(0, None, None, '": 1')],
        [ToolDelta(0, None, None, "}")],
        [],
    ]


LONG = 20_000


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("<" * LONG, marks=pytest.mark.slow),
        " " * LONG,
        "<tool_call>" * (LONG // 11),
        '<tool_call>{"name": "' * (LONG // 21),
        '<tool_call>{"arguments": {"a": "' + "x" * LONG,
        pytest.param('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * LONG, marks=pytest.mark.slow),
        pytest.param('<tool_call>{"name": "f", "arguments": {"a": ' + "1" * LONG, marks=pytest.mark.slow),
        '<tool_call>{"name": "f", "arguments": {"a": 1}} ' + "</tool_call" * (LONG // 11),
    ],
)
def test_time_is_linear(text: str) -> None:
    short = cpu_seconds(lambda: read("hermes", text[: LONG // 10], range(1, LONG // 10)))
    bound_s = 40 * short + 0.1  # 10 if linear, 100 if quadratic
    assert is_within(bound_s, lambda: read("hermes", text[:LONG], range(1, LONG)))


def test_ids_are_random() -> None:
    made = {delta.id for _ in range(20) for delta in _two_calls("hermes") if isinstance(delta, ToolDelta)}
    assert len(made) == 40
    assert all(each and each.startswith("call_") and len(each) == 29 for each in made)
    assert all(len(each.id or "") == 9 for each in _two_calls("mistral") if isinstance(each, ToolDelta))


def _two_calls(name: str) -> list[Delta]:
    return parse(parser_of(name), [written(name, [("f", "{}"), ("g", "{}")])])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tools></tools>\\n<tool_call>\\n{"name": <function-name>}', "hermes"),
        ("{{ '<|start_header_id|>' }} \"parameters\": dictionary", "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_a_format_is_found_by_the_template(template: str | None, name: str | None) -> None:
    found = find_format(template)
    assert found is (find_format(None, name) if name else None)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        find_format("<tool_call>", "hermis")


FRAME = """{%% for m in messages %%}<|im_start|>{{ m.role }}
{%% if m.tool_calls %%}{%% for c in m.tool_calls %%}{%% set f = c.function %%}%s{%% endfor %%}
{%%- else %%}%s{{ m.content }}{%% endif %%}<|im_end|>
{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant
%s{%% endif %%}{# tools %s #}"""
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
THOUGHT = "{%% if m.reasoning_content %%}<%s>\n{{ m.reasoning_content }}\n</%s>\n\n{%% endif %%}"


def template(call: str = "", thought: str = "", opening: str = "", mentions: str = "") -> str:
    return FRAME % (call, thought, opening, mentions)


TEMPLATES: list[tuple[str, str | None, str]] = [
    ("hermes", "hermes", template(f"<tool_call>\n{OBJECT}\n</tool_call>")),
    ("hermes after reasoning", "hermes", template(f"<tool_call>{OBJECT}</tool_call>", opening="<think>\n")),
    ("another marker", None, template(f"<tool_calls>[{OBJECT}]</tool_calls>", mentions="<tool_call>")),
    ("tags within tags", None, template("]<[<tool_call>]<[<invoke name={{ f.name }}>]<[</tool_call>")),
    ("llama3", "llama3", template(OBJECT.replace("arguments", "parameters", 1), mentions="<|python_tag|>")),
    (
        "a function's tag",
        None,
        template("<function={{ f.name }}>{{ f.arguments | tojson }}</function>", mentions="<|python_tag|>"),
    ),
    ("mistral", "mistral", template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}")),
    ("mistral's list", "mistral", template(f"[TOOL_CALLS] [{OBJECT}]")),
    ("Python", None, template("[TOOL_CALLS]{{ f.name }}(word='sea')")),
    ("other arguments", None, template('<tool_call>{"name": "{{ f.name }}", "arguments": {}}</tool_call>')),
    ("a cut call", None, template('<tool_call>{"name": "{{ f.name }}", "arguments": {"word": "sea"')),
    ("no calls", "hermes", template(mentions="<tool_call>")),
    ("calls are an error", "hermes", template("{{ raise_exception('no') }}<tool_call>")),
    ("harmony", "harmony", HARMONY_TEMPLATE),
    ("no harmony", None, template("{{ f.name }}", mentions="<|channel|><|message|><|call|>")),
]


@pytest.mark.parametrize(("name", "source"), [pytest.param(*each[1:], id=each[0]) for each in TEMPLATES])
def test_a_call_is_read_back(name: str | None, source: str) -> None:
    assert find_format(source) is (find_format(None, name) if name else None)
    problems = unknown_formats(tokenizer_with_tags(False, source), None)
    assert ["--tool-parser" in each for each in problems] == ([] if name else [True])
    assert unknown_formats(tokenizer_with_tags(False, source), "hermes") == []


REASONED: list[tuple[str, str | None, str]] = [
    ("think", "</think>", template(thought=THOUGHT % ("think", "think"))),
    ("opened", "</think>", template(thought=THOUGHT % ("think", "think"), opening="<think>\n")),
    ("seed", "</seed:think>", template(thought=THOUGHT % ("seed:think", "seed:think"))),
    ("the second tags", "[/THINK]", template(thought="[THINK]{{ m.thinking }}[/THINK]", mentions="</think>")),
    ("others", None, template(thought=THOUGHT % ("mm:think", "mm:think"), mentions="</think>")),
    ("after the content", None, template(thought="</think>{{ m.reasoning }}: ")),
    ("not written", "</think>", template(mentions="</think>")),
    ("none", None, template()),
]


@pytest.mark.parametrize(("end", "source"), [pytest.param(*each[1:], id=each[0]) for each in REASONED])
def test_reasoning_is_read_back(end: str | None, source: str) -> None:
    tags = find_tags(source)
    assert (tags and tags.end) == end
    problems: list[Any] = unknown_formats(tokenizer_with_tags(False, source), "hermes")
    assert bool(problems) == (end is None and "</think>" in source)
