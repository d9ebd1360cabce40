"""100 random answers with calls in each format are read back, as a template of the format writes them."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from speculant.serving import MessageReader, TextDelta, ToolDelta, find_format, joined_calls, parse, read_tools
from speculant.text import answer_in
from tests.examples import examples
from tests.timing import cpu_seconds, is_within

FRAME = """{% for m in messages %}<|im_start|>{{ m.role }}@n{{ m.content }}{% if m.tool_calls %}@before
{%- for c in m.tool_calls %}{% set f = c.function %}{% if not loop.first %}@between{% endif %}@call{% endfor %}@after
{%- endif %}<|im_end|>@n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant@n{% endif %}"""
SHORT = {
    "@name": "{{ f.name }}",
    "@json": "{{ f.arguments | tojson }}",
    "@object": '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
    "@each": "{% for k, v in f.arguments | items %}",
    "@key": "{{ k }}",
    "@text": "{{ v if v is string else v | tojson }}",
    "@is_text": "{{ 'true' if v is string else 'false' }}",
    "@python": "{{ ([v] | string)[1:-1] }}",
    "@gemma": "{{ value(v) }}",
    "@comma": "{{ ',' if not loop.last }}",
    "@end": "{% endfor %}",
    "@n": "{{ '\\n' }}",
}
GEMMA = """{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ '{' }}
{%- for k, v in v | items %}@key:@gemma@comma@end{{ '}' }}
{%- elif v is sequence %}[{% for v in v %}@gemma@comma@end]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"""
INVOKE = '<invoke name="@name">\n@each<parameter name="@key"@is>@text</parameter>\n@end</invoke>\n'
QWEN = "<tool_call>\n<function=@name>\n@each<parameter=@key>\n@text\n</parameter>\n@end</function>\n</tool_call>"


def template(call: str, before: str = "", between: str = "", after: str = "", first: str = "") -> str:
    """Return a chat template in which these texts are around calls; the names in SHORT stand for parts of it."""
    texts = {"@before": before, "@between": between, "@call": call, "@after": after}
    made = first + FRAME
    for name, text in {**{name: text.replace("\n", "@n") for name, text in texts.items()}, **SHORT}.items():
        made = made.replace(name, text)
    return made


def dsml(text: str) -> str:
    return re.sub("<(/?)", "<\\1\uff5cDSML\uff5c", text)


def marks(text: str) -> str:
    """Return a text with DeepSeek's marks in place of ones in plain characters."""
    return re.sub(r"<\|[a-z_]*\|>", lambda mark: mark[0].replace("|", "\uff5c").replace("_", "\u2581"), text)


TEMPLATES = {
    "hermes": template("<tool_call>\n@object\n</tool_call>", "\n", "\n"),
    "llama3": template('{"name": "@name", "parameters": @json}', "<|python_tag|>", "; "),
    "mistral": template("[TOOL_CALLS]@name[ARGS]@json"),
    "mistral: list": template("@object", "[TOOL_CALLS][", ", ", "]"),
    "granite": template("@object", "<|tool_call|>[", ", ", "]"),
    "phi4": template("@object", "<|tool_call|>[", ",", "]<|/tool_call|>", "{# <|tool|><|/tool|> #}"),
    "phi4: objects": template("<|tool_call|>@object<|/tool_call|>", first="{# <|tool|><|/tool|> #}"),
    "qwen3_coder": template(QWEN, "\n\n", "\n"),
    "glm": template(
        "<tool_call>@name\n@each<arg_key>@key</arg_key>\n<arg_value>@text</arg_value>\n@end</tool_call>", "\n", "\n"
    ),
    "glm: no lines": template(
        "<tool_call>@name@each<arg_key>@key</arg_key><arg_value>@text</arg_value>@end</tool_call>"
    ),
    "minimax": template(INVOKE.replace("@is", ""), "\n<minimax:tool_call>\n", "", "</minimax:tool_call>"),
    "deepseek_v32": template(
        dsml(INVOKE).replace("@is", ' string="@is_text"'), dsml("\n\n<function_calls>\n"), "", dsml("</function_calls>")
    ),
    "deepseek": template(
        marks("<|tool_call_begin|>@name<|tool_sep|>{{ '' + f.arguments }}<|tool_call_end|>"),  # takes only text
        *(marks("<|tool_calls_begin|>"), "", marks("<|tool_calls_end|>")),
    ),
    "deepseek: blocks": template(
        marks("<|tool_call_begin|>{{ c.type }}<|tool_sep|>@name\n```json\n@json\n```<|tool_call_end|>"),
        *(marks("<|tool_calls_begin|>"), "\n", marks("<|tool_calls_end|>")),
    ),
    "kimi": template(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>@json<|tool_call_end|>",
        *("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    ),
    "pythonic": template("@name(@each@key=@python@comma@end)", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "pythonic: objects": template("@object", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "gemma4": template("<|tool_call>call:@name{{ '{' }}@each@key:@gemma@comma@end{{ '}' }}<tool_call|>", first=GEMMA),
}
BARE = template("@name(@each@key=@python@comma@end)", "[", ", ", "]", "{# [func_name1(a=1)] #}")

NESTED = {"type": "object", "properties": {"deep": {"type": "array", "items": {"type": "string"}}}}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"$ref": "#/$defs/Unit"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "exact": {"type": "boolean"},
        "list": {"type": "array", "items": {}},
        "options": NESTED,
        "any": {},
    },
    "$defs": {"Unit": {"enum": ["Grad", "Kelvin"]}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "get_x", "a.b-c")]
PIECES = [
    "word",
    "é",
    "😀",
    '"',
    "'",
    "\n",
    "\\",
    "\\n",
    "\t",
    " ",
    "{",
    "}",
    "[",
    ",",
    ":",
    "<",
    "</",
    "日本",
    "\x7f",
    ")",
]


def text_of(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randrange(9)))


def value_of(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 5:
        return [value_of(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {f"k{i}": value_of(rng, depth - 1) for i in range(rng.randrange(4))}
    return [text_of(rng), rng.randrange(-(10**12), 10**12), rng.uniform(-1e9, 1e9), rng.random() < 0.5, None][kind]


def arguments_of(rng: random.Random) -> dict[str, Any]:
    word = f"w{text_of(rng)}"  # is no JSON
    made = {
        "city": text_of(rng),
        "unit": rng.choice(["Grad", "Kelvin"]),
        "note": rng.choice([None, word]),
        "count": rng.randrange(-99, 10**6),
        "ratio": rng.choice([0, -1.5, 1e-7, 3e21]),
        "exact": rng.random() < 0.5,
        "list": [value_of(rng) for _ in range(rng.randrange(3))],
        "options": {"deep": [text_of(rng) for _ in range(rng.randrange(3))]},
        "any": rng.choice([word, 7, None, {"a": [word]}]),
    }
    return {key: made[key] for key in rng.sample(sorted(made), rng.randrange(len(made) + 1))}


def answers(template: str, count: int) -> Iterator[tuple[str, str, list[tuple[str, str, dict[str, Any]]], str]]:
    """Yield random answers with the text before their calls, the calls, and the text after them."""
    rng = random.Random(template)
    for _ in range(count):
        names = [rng.choice(TOOLS)["function"]["name"] for _ in range(rng.randrange(1, 4))]
        calls = [(f"functions.{name}:{i}", name, arguments_of(rng)) for i, name in enumerate(names)]
        content, rest = rng.choice(["", "I look.", "Two\nlines < 3:\n"]), rng.choice(["", " So.", "\nDone.\n"])
        given = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
        answer = answer_in(template, {"role": "assistant", "content": content, "tool_calls": given}, TOOLS)
        assert answer is not None
        yield answer + rest, content, calls, f"<|im_end|>\n{rest}"


def read(name: str, pieces: Sequence[str]) -> tuple[str, list[ToolDelta], bool]:
    """Return the text and the calls of an answer, and whether the last call is cut."""
    found, numbers = find_format(None, name.partition(":")[0]), itertools.count()
    assert found is not None
    parser = found(lambda: f"id{next(numbers)}").after("", read_tools(TOOLS))
    calls: list[ToolDelta] = []
    texts: list[str] = []
    for delta in parse(parser, pieces):
        if isinstance(delta, TextDelta):
            texts.append(delta.text)
        elif isinstance(delta, ToolDelta) and delta.id:
            assert delta.index == len(calls)
            calls.append(delta)
        elif isinstance(delta, ToolDelta):
            last = calls[delta.index]
            calls[delta.index] = ToolDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
    return "".join(texts), calls, parser.is_cut


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_call_is_read_however_it_is_cut(name: str) -> None:
    assert find_format(TEMPLATES[name]) is find_format(None, name.partition(":")[0])
    rng = random.Random(name)
    for answer, content, calls, rest in answers(TEMPLATES[name], examples(100)):
        text, found, is_cut = read(name, [answer])
        assert not is_cut, answer
        assert [(each.name, json.loads(each.arguments)) for each in found] == [call[1:] for call in calls], answer
        assert [each.id for each in found] == [
            call_id if name == "kimi" else f"id{i}" for i, (call_id, *_) in enumerate(calls)
        ]
        assert text == content.rstrip() + rest
        places = sorted(rng.choices(range(len(answer) + 1), k=5))
        for cuts in (range(len(answer) + 1), [0, *places, len(answer)]):
            assert read(name, [answer[i:j] for i, j in itertools.pairwise(cuts)]) == (text, found, is_cut)


def test_streamed_and_whole_calls_have_the_same_ids_and_indexes() -> None:
    for answer, _, calls, _ in answers(TEMPLATES["kimi"], 5):
        found = find_format(None, "kimi")
        assert found is not None
        reader = MessageReader(tools=found().after("", read_tools(TOOLS)))
        deltas = [*(reader.feed(char).as_delta() for char in answer), reader.finish().as_delta()]
        streamed = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [(each["index"], each["id"]) for each in streamed if "id" in each] == [
            (i, call_id) for i, (call_id, *_) in enumerate(calls)
        ]
        assert [each["id"] for each in joined_calls(reader.message.calls)] == [call_id for call_id, *_ in calls]


def test_a_list_of_calls_without_marks_begins_the_text() -> None:
    assert find_format(BARE) is find_format(None, "pythonic")
    answer = """[f(city='What's up', list=["a", None], ratio=-1.5), get_x()]"""
    text, found, _ = read("pythonic", [*answer])
    assert text == ""
    assert [json.loads(each.arguments) for each in found] == [
        {"city": "What's up", "list": ["a", None], "ratio": -1.5},
        {},
    ]
    for text in (f"See {answer}", "[f(1)]", "[1](f)", "[f]"):
        assert read("pythonic", [text]) == (text, [], False)


TYPED = [
    ("count", "5", 5),
    ("count", " -7 \n", -7),
    ("count", "five", "five"),
    ("ratio", "1e-3", 1e-3),
    ("ratio", "", ""),
    ("exact", "True", True),
    ("exact", "false", False),
    ("city", "5", "5"),
    ("city", "null", "null"),
    ("city", '"a"', '"a"'),
    ("unit", "Grad", "Grad"),
    ("note", "null", None),
    ("note", "None", None),
    ("note", "5", "5"),
    ("note", "None of it", "None of it"),
    ("note", "{}", "{}"),
    ("list", "[1, 'a', {'b': True}]", [1, "a", {"b": True}]),
    ("options", '{"deep": ["\\u00e9\\/"]}', {"deep": ["é/"]}),
    ("any", "7", 7),
    ("any", "seven", "seven"),
    ("any", "{'a': None}", {"a": None}),
    ("any", "{a}", "{a}"),
    ("unknown", "[1]", [1]),
    ("unknown", " text", " text"),
]


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_a_value_has_a_type_of_its_schema(key: str, text: str, value: object) -> None:
    answer = f"<tool_call><function=f><parameter={key}>{text}</parameter></function></tool_call>"
    for pieces in ([answer], [*answer]):
        _, (call,), is_cut = read("qwen3_coder", pieces)
        assert (json.loads(call.arguments), is_cut) == ({key: value}, False)


@pytest.mark.parametrize("name", TEMPLATES)
def test_wrong_and_cut_answers_keep_their_words(name: str) -> None:
    rng = random.Random(name)
    for answer, *_ in answers(TEMPLATES[name], examples(40)):
        place, count = rng.randrange(len(answer)), rng.randrange(4)
        for wrong in (answer[:place] + rng.choice(PIECES) * (count % 2) + answer[place + count :], answer[:place]):
            whole = read(name, [wrong])
            assert read(name, [*wrong]) == whole
            made = whole[0] + "".join(call.arguments for call in whole[1])
            for word in ("word", "日本", "Done", "lines"):
                assert made.count(word) >= wrong.count(word), wrong


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_long_argument_is_streamed_in_linear_time(name: str) -> None:
    def answer(length: int) -> str:
        call = {"name": "f", "arguments": {"city": "x" * length, "list": ["y" * length], "note": "z" * length}}
        message = {"content": "", "tool_calls": [{"id": "functions.f:0", "type": "function", "function": call}]}
        return answer_in(TEMPLATES[name], {"role": "assistant", **message}, TOOLS) or ""

    short, long = [*answer(1000)], [*answer(10_000)]
    bound_s = 40 * cpu_seconds(lambda: read(name, short)) + 0.1  # 10 if linear, 100 if quadratic
    assert is_within(bound_s, lambda: read(name, long))
    found = find_format(None, name.partition(":")[0])
    assert found is not None
    parser = found().after("", read_tools(TOOLS))
    pieces = [delta for char in long for delta in parser.feed(char) if isinstance(delta, ToolDelta)]
    assert len(pieces) > 29_000
