"""A chat template has limits on text, memory and time, which common templates do not reach."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from transformers.utils.chat_template_utils import render_jinja_template

from speculant.errors import ModelError, RequestError, SpeculantError
from speculant.text import ChatTemplate, sandbox


def nested(value: str) -> str:
    """Return a template that prints a value after 99 steps, each of which makes it contain the previous value twice."""
    return "{% set x = namespace(t=1) %}{% for i in range(99) %}{% set x.t = " + value + " %}{% endfor %}{{ x.t }}"


BOMBS = {
    "power": "{{ 10**(10**10) }}",
    "powers": "{% set x = namespace(n=2) %}{% for i in range(99) %}{% set x.n = x.n ** x.n %}{% endfor %}",
    "products": "{% set x = namespace(n=3) %}{% for i in range(99) %}{% set x.n = x.n * x.n %}{% endfor %}",
    "repeated text": "{{ ('a' * 10**10) | length }}",
    "repeated list": "{{ ([1] * 10**10) | length }}",
    "repeated by the left": "{{ (10**10 * 'a') | length }}",
    "doubled text": "{% set x = namespace(t='a') %}{% for i in range(99) %}{% set x.t = x.t + x.t %}{% endfor %}",
    "doubled list": "{% set x = namespace(t=[1]) %}{% for i in range(99) %}{% set x.t = x.t + x.t %}{% endfor %}",
    "concatenated": "{% set x = namespace(t='a') %}{% for i in range(99) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
    "captured": "{% set x = namespace(t='a') %}{% for i in range(99) %}"
    "{% set t %}{{ x.t }}{{ x.t }}{% endset %}{% set x.t = t %}{% endfor %}",
    "nested list": nested("[x.t, x.t]"),
    "nested tuple": nested("(x.t, x.t)"),
    "nested dict": nested("{1: x.t, 2: x.t}"),
    "nested calls": nested("dict(a=x.t, b=x.t)"),
    "nested namespace": nested("namespace(a=x.t, b=x.t)"),
    "nested by map": nested("[none, none] | map('default', x.t, true) | list"),
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops with text": "{% set t %}{% for i in range(99999) %}" + "a" * 10_000 + "{% endfor %}{% endset %}",
    "macro calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}"
    "{% endfor %}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "percent precision": "{{ '%.999999999f' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "percent key": "{{ '%(a(b))0999999999d' % {'a(b)': 1} }}",
    "percent many": "{{ ('%s' * 10**5) % (('a' * 10**6,) * 10**5) }}",
    "percent filter": "{{ '%0999999999d' | format(1) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format computed": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "format many": "{{ ('{0}' * 10**5).format('a' * 10**6) }}",
    "format map": "{{ '{a:>9999999999}'.format_map({'a': 1}) }}",
    "centred": "{{ 'a'.center(3000000000) }}",
    "padded": "{{ 'a'.ljust(3000000000) ~ 'a'.rjust(3000000000) }}",
    "zeros": "{{ 'a'.zfill(3000000000) }}",
    "tabs": "{{ ('\\t' * 10**6).expandtabs(10**6) }}",
    "bytes": "{{ (1).to_bytes(3000000000, 'big') }}",
    "replaced": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "replaced nothing": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "replaced by filter": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "joined": "{{ ('a' * 10**6).join(['b'] * 10**5) }}",
    "joined characters": "{{ ('a' * 10**6).join('b' * 10**5) }}",
    "joined by filter": "{{ (['b'] * 10**5) | join('a' * 10**6) }}",
    "joined attributes": "{{ ([{'a': 'b' * 10**6}] * 10**6) | join(attribute='a') }}",
    "translated": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "indented": "{{ ('a\\n' * 10**6) | indent(10**6) }}",
    "indented by text": "{{ ('a\\n' * 10**6) | indent('a' * 10**6) }}",
    "indented json": "{{ ([1] * 10**6) | tojson(indent=10**6) }}",
    "separated json": "{{ ([1] * 10**6) | tojson(separators=('a' * 10**6, ':')) }}",
    "text of a list": "{{ (['a' * 10**6] * 10**6) | string }}",
    "upper case of a list": "{{ (['a' * 10**6] * 10**6) | upper }}",
    "json of a list": "{{ (['a' * 10**6] * 10**6) | tojson }}",
    "numbers": "{{ ([10**4000] * 10**6) | string }}",
    "filled": "{{ [1] | batch(10**10, 'a') | list | length }}",
    "sliced": "{{ [1] | slice(10**10) | list | length }}",
    "rounded": "{{ 1 | round(10**10) }}{{ 1 | round(10**10, 'floor') }}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "date": "{{ strftime_now('%3000000000d') }}",
    "complaint": "{{ raise_exception(['a' * 10**6] * 10**6) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "filter center": "{{ 'a' | center(3000000000) }}",
    "filter wordwrap": "{{ ('a ' * 10**6) | wordwrap(1, wrapstring='a' * 10**6) }}",
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "Né & <b>", "parameters": {"type": "object"}}}
    for name in ("add", "find")
]
CALL = {"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"b": [1, 2.5], "a": "x"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": {"content": 4}, "tool_call_id": "123456789"},
    {"role": "assistant", "content": "<think>four\nlines</think>It is\t4 & more."},
    {"role": "user", "content": "Thanks 👍"},
]
USUAL = {
    "by parts": """{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>\\n\\n' }}
        {%- if m.content is string %}{{ m['content'] | trim }}{% elif m.content is mapping %}{{ m.content | string }}
        {%- else %}{% for part in m['content'] %}{% if part.type == 'text' %}{{ part['text'] | trim }}
        {%- elif part['type'] == 'image' %}<|image|>{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}""",
    "tool calls": """{% for m in messages if m.tool_calls is defined and m.tool_calls | length != 0 %}
        {%- for call in m.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif %}
        {{- call.name + '(' }}{% for key in call.arguments %}{{ key + '="' + "%s" | format(call.arguments[key]) + '"' }}
        {%- if not loop.last %}, {% endif %}{% endfor %}{{ ')' }}{{ loop.index0 ~ '/' ~ loop.length }}{% endfor %}
        {%- set out = m.tool_calls[0] | tojson %}{{ out[:-1] ~ ', "id": "' ~ m.tool_calls[0].id[-9:] ~ '"}' }}
        {%- endfor %}{{ tools | tojson(indent=4) }}""",
    "filtered messages": """{%- set users = messages | selectattr("role", "equalto", "user") | list %}
        {%- set kept = [] %}{% for m in messages %}{% if m["role"] not in ["tool"] and not m.get("tool_calls") %}
        {%- set kept = kept + [m] %}{% endif %}{% endfor %}{{ kept | length }}
        {%- for m in messages[1:] %}{% if m == users[-1] %}{{ tools | map(attribute='function.name') | join(', ') }}
        {%- endif %}{% endfor %}{% for key, value in tools[0].function.items() if key != 'description' %}
        {{- '"%s": ' % key + (value | tojson) }}{% if not loop.last %}, {% endif %}{% endfor %}""",
    "last question": """{%- set ns = namespace(searching=true, last=messages | length - 1) %}
        {%- for m in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}
        {%- if ns.searching and m.role == "user" and m.content is string and not m.content.startswith('<tool>') %}
        {%- set ns.searching = false %}{% set ns.last = index %}{% endif %}{% endfor %}{{ ns.last }}
        {%- for m in messages %}{% if m.content is string and '</think>' in m.content %}
        {%- set think = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {{- '[' + think.strip('\\n') + ']' }}{{ m.content.split('</think>')[-1] | replace('4', 'four') | upper }}
        {%- endif %}
        {%- if loop.previtem and loop.previtem.role != 'tool' and not loop.last %}{{ loop.nextitem.role }}{% endif %}
        {%- endfor %}""",
    "macros": """{%- macro show(value, keys=true) -%}{%- if value is string -%}{{ '"' + value + '"' }}
        {%- elif value is mapping -%}{{ '{' }}{% set ns = namespace(first=true) %}{% for k, v in value | dictsort %}
        {%- if not ns.first %},{% endif %}{% set ns.first = false %}{{ k if not keys else "'" ~ k ~ "'" }}:
        {{- show(v, keys=keys) }}
        {%- endfor %}{{ '}' }}{% elif value is sequence %}{{ '[' }}{% for v in value %}{{ show(v, keys=keys) }}
        {%- if not loop.last %},{% endif %}{% endfor %}{{ ']' }}{% else %}{{ value }}{% endif %}{%- endmacro -%}
        {% for m in messages %}{{ show(m, keys=loop.index is odd) }}{% endfor %}
        {% for i in range(3, -1, -1) %}{{ i % 2 + 2 ** i }}{{ '\\n'.join(['a', 'b']) | indent(2) }}{% endfor %}
        {% set text %}{% macro twice() %}{{ caller(1) ~ caller(2) }}{% endmacro %}
        {%- call(x) twice() %}{{ x }}{% endcall %}{% filter upper %}b{% endfilter %}{% endset %}
        {{- text | trim }}""",
}


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Let the process allocate at most 4 GiB more than it has."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def render(source: str, messages: Any = CONVERSATION, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, False, **variables)


LONG = ("recursive loop", "macro calls", "nested calls", "nested namespace", "nested by map")  # others are like them


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in BOMBS])
@pytest.mark.usefixtures("_little_memory")
def test_a_template_that_makes_too_much_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 10**5)
    started = time.process_time()
    with pytest.raises((ModelError, RequestError)) as caught:
        render(BOMBS[name])
    assert time.process_time() - started < 3
    assert isinstance(caught.value.__cause__, SecurityError | UndefinedError | TemplateSyntaxError)
    assert len(str(caught.value)) < 1000


def test_a_template_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.05)
    searching = "{% set t = 'a' * 10**6 %}{% for i in range(99999) %}{{ 'b' in t }}{% endfor %}"
    with pytest.raises(ModelError, match="it ran for more than 0.05 seconds"):
        render(searching)


@pytest.mark.parametrize("name", USUAL)
def test_common_templates_render_as_in_transformers(name: str) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = render_jinja_template([CONVERSATION], tools=TOOLS, chat_template=USUAL[name], **variables)
    ours = ChatTemplate(USUAL[name]).render(CONVERSATION, False, tools=TOOLS, **variables)
    assert ours == theirs[0]


@pytest.mark.parametrize("name", USUAL)
def test_the_budget_grows_with_the_conversation(name: str) -> None:
    """A thousand turns of 2 kB each, mostly in the content of one message."""
    turns = [{**message, "content": "word " * 400} for message in CONVERSATION[4:]] * 500
    messages = [*CONVERSATION, *turns, {"role": "user", "content": "word " * 10**6}]
    assert render(USUAL[name], messages, tools=TOOLS, bos_token="<s>")


def test_messages_that_contain_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_ELEMENTS", 10**4)
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(SpeculantError):
        render("{{ messages | tojson }}", [message])


def test_renderings_do_not_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 1000)
    template = ChatTemplate("{% for i in range(600) %}{% endfor %}")
    for _ in range(3):
        assert template.render([], False) == ""


def test_names_of_the_sandbox_are_inaccessible() -> None:
    assert render("{{ budget is defined }}{{ self is defined }}", []) == "FalseTrue"
    assert render("{{ namespace(a=1)._Namespace__attrs }}{{ self._TemplateReference__context }}") == ""
    with pytest.raises(ModelError, match="No filter named 'counted'"):
        render("{{ 1 | counted(2) }}")
