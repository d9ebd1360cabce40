"""A format counts as known only if its parser reads the call, or the reasoning, that the model's template writes."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.serving.tool_use import unknown_formats
from speculant.serving.tools import find_format
from speculant.text.chat import find_tags
from tests.tagged import HARMONY_TEMPLATE, tokenizer_with_tags

FRAME = """{%% for m in messages %%}<|im_start|>{{ m.role }}
{%% if m.tool_calls %%}{%% for c in m.tool_calls %%}{%% set f = c.function %%}%s{%% endfor %%}
{%%- else %%}%s{{ m.content }}{%% endif %%}<|im_end|>
{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant
%s{%% endif %%}{# tools %s #}"""
OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
THOUGHT = "{%% if m.reasoning_content %%}<%s>\n{{ m.reasoning_content }}\n</%s>\n\n{%% endif %%}"


def template(call: str = "", thought: str = "", opening: str = "", mentions: str = "") -> str:
    return FRAME % (call, thought, opening, mentions)


CALLS: list[tuple[str, str | None, str]] = [
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


@pytest.mark.parametrize(("name", "source"), [pytest.param(*each[1:], id=each[0]) for each in CALLS])
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
