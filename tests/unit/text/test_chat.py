"""Chats: messages, templates and continued answers."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import ModelError, RequestError
from speculant.text import (
    ROLES,
    TOOL_USE,
    ChatTemplate,
    Tokenizer,
    check_roles,
    check_variables,
    find_template,
    read_messages,
    up_to_mark,
    with_mark,
)
from tests.unit.text.tokenizers_for_tests import SETTINGS, byte_level

MESSAGES = [{"role": "user", "content": "Hi & <hello>"}, {"role": "assistant", "content": "Yes?"}]
CHATML = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

CALLS = """{%- macro shown(content, loud=false) %}{{- content|trim ~ ('!' if loud else '') }}{% endmacro %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] if ns.open and message.role == 'user' %}
    {%- if not message.content.startswith('<result>') %}
        {%- set ns.open = false %}{% set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else
            message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {{- '<a>' ~ (thought if loop.index0 > ns.last else '') ~ message.content.split('</think>')[-1] }}
        {%- for call in message.tool_calls if call.function is defined %}
            {%- for name, value in call.function.arguments|items %}
                {{- '<' + name + '>' }}
                {{- value | tojson | safe if value is mapping or (value is sequence and value is not string)
                    else value | string }}
            {%- endfor %}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<u>' }}{% endif %}
        {{- '<result>' + message.content }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '</u>' }}{% endif %}
    {%- else %}{{ '<u>' ~ shown(message.content, loop.first) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<a>' + ('<think></think>' if enable_thinking is defined and enable_thinking is false else '<think>') }}
{%- endif %}"""
CALL = {
    "type": "function",
    "function": {"name": "look", "arguments": {"of": "ü <b>", "deep": {"a": [1, None]}, "n": 3}},
}
CALLING = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes", "tool_calls": [CALL, CALL]},
    *({"role": "tool", "content": text} for text in "ab"),
    {"role": "assistant", "content": "So", "reasoning_content": "r"},
]


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, False, **variables)


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(byte_level().backend, SETTINGS, template)


def test_a_conversation_is_rendered() -> None:
    tokenizer = with_template(CHATML)
    text = "<s><|user|>Hi & <hello></s><|assistant|>Yes?</s>"
    assert tokenizer.apply_chat_template(MESSAGES) == text + "<|assistant|>"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == text


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look", "é": [1]}}]])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize(("source", "messages"), [(CHATML, MESSAGES), (CALLS, MESSAGES), (CALLS, CALLING)])
def test_rendering_equals_transformers(source: str, messages: Any, variables: dict[str, Any], tools: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True, **variables}
    theirs, _ = render_jinja_template([messages], tools=tools, chat_template=source, **given)
    assert ChatTemplate(source).render(read_messages(messages, source), tools=tools, **given) == theirs[0]


def test_the_template_s_own_error_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="unknown role robot"):
        with_template(CHATML).apply_chat_template([{"role": "robot", "content": ""}])


@pytest.mark.parametrize("messages", [[{"content": "no role"}], [{"role": "user", "content": None}], ["text"]])
def test_messages_of_a_wrong_shape_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="can't render"):
        with_template(CHATML).apply_chat_template(messages)


@pytest.mark.parametrize(("template", "reason"), [("{% for %}", "not valid"), (None, "no chat template")])
def test_an_invalid_template_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        with_template(template).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi & <hello>"}'),
        ("{{ ['é'] | tojson(indent=1) }}", '[\n "é"\n]'),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}", "user"),
    ],
    ids=["HTML is not escaped", "indented", "generation blocks are their content"],
)
def test_templates_have_the_filters_and_blocks_of_transformers(source: str, text: str) -> None:
    assert render(source) == text


def test_templates_can_format_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10000000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_stops_forbidden_access(attack: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    with pytest.raises((ModelError, RequestError)):
        render(attack, messages)
    assert messages == MESSAGES


def test_templates_are_found_in_each_place(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, {"chat_template": "S"}) == "S"
    assert find_template(tmp_path, {"chat_template": named}) == "D"
    assert find_template(tmp_path, {"chat_template": named}, TOOL_USE) == "T"
    assert find_template(tmp_path, {"chat_template": "S"}, TOOL_USE) is None
    (tmp_path / "chat_template.jinja").write_text("F")
    assert find_template(tmp_path, {"chat_template": "S"}) == "F"


# --- messages are checked, and converted to the form that chat templates read


USER = {"role": "user", "content": "Hi"}


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_texts_are_unchanged() -> None:
    messages = [{"role": role, "content": "x"} for role in ROLES if role != "developer"]
    assert read_messages(messages) == messages
    assert read_messages(({"role": "developer", "content": ""},)) == [{"role": "system", "content": ""}]


def test_a_developer_is_the_system_unless_the_template_has_one() -> None:
    message = {"role": "developer", "content": "x"}
    for template in (None, "{{ messages }}", "{# developer #}"):
        assert read_messages([message], template) == [{"role": "system", "content": "x"}]
    for template in ("{% if message.role == 'developer' %}", '{% if m["role"] in ["system", "developer"] %}'):
        assert read_messages([message], template) == [message]


def test_an_assistant_s_refusal_is_its_content() -> None:
    answer = {"role": "assistant", "content": "no"}
    part = {"type": "refusal", "refusal": "no"}
    for given in (
        {"content": None, "refusal": "no"},
        {"refusal": "no"},
        {"content": [part]},
        answer | {"refusal": "x"},
    ):
        assert read_messages([{"role": "assistant", **given}]) == [answer]
    for wrong in ({"role": "user", "refusal": "no"}, {"role": "user", "content": [part]}):
        with pytest.raises(RequestError, match=r"has no content|part of type 'refusal'"):
            read_messages([wrong])


def test_a_role_that_the_template_leaves_out_is_refused() -> None:
    given = [USER, {"role": "critic", "content": " bad "}, {"role": "critic", "content": "worse"}]
    conversation = read_messages(given)
    assert [message["role"] for message in conversation] == ["user", "critic", "critic"]
    check_roles(conversation, "", "Hi bad worse")
    check_roles(conversation, "{% if message.role == 'critic' %}", "Hi")
    for text in ("Hi", "Hi bad", "Hi worse bad"):
        with pytest.raises(RequestError, match=r"message [23] has the role 'critic', whose messages .* leaves out"):
            check_roles(conversation, "", text)
    with pytest.raises(RequestError, match="did you mean 'user'"):
        check_roles(read_messages([{"role": "usr", "content": "Hi"}]), "", "")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"text": "you"}]
    assert read_messages([{"role": "user", "content": parts, "name": "Ann"}]) == [
        {"role": "user", "content": "Hi you", "name": "Ann"}
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [('{"a": [1]}', {"a": [1]}), ({"a": 1}, {"a": 1}), ("{cut", "{cut"), ("[1]", "[1]"), ("[" * 10**5, "[" * 10**5)],
)
def test_arguments_become_objects(given: Any, read: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [called(given)]}
    assert read_messages([message]) == [{"role": "assistant", "content": "", "tool_calls": [called(read)]}]


def test_the_caller_s_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [called("{}")]}
    read_messages([message])
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [called("{}")]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hi", "a conversation is a str"),
        (None, "a conversation is a NoneType"),
        ([], "no messages"),
        (["Hi"], "message 1 is a str"),
        ([USER, {"content": "Hi"}], "message 2 has no role"),
        ([{"role": "us er", "content": "Hi"}], "did you mean 'user'"),
        ([{"role": "<|system|>", "content": "Hi"}], "has the role"),
        ([{"role": "x" * 65, "content": "Hi"}], "has the role"),
        ([{"role": ["user"], "content": "Hi"}], "has the role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "assistant", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "a content that is a int"),
        ([{"role": "user", "content": ["Hi"]}], "a part of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "a part of type 'image_url'"),
        ([{"role": "assistant", "tool_calls": "f"}], "tool_calls that are not calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "tool_calls that are not calls"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_messages(messages)


def test_variables_can_t_replace_parameters() -> None:
    assert check_variables(None) == {}
    assert check_variables({"enable_thinking": False}) == {"enable_thinking": False}
    with pytest.raises(RequestError, match="can't set tools"):
        check_variables({"tools": []})
    with pytest.raises(RequestError, match="chat_template_kwargs is"):
        check_variables(["enable_thinking"])


# --- a last message that the answer continues is rendered as transformers renders it


MARK = "0123456789abcdef"
EACH = "{%% for m in messages %%}<|{{ m.role }}|>%s{%% endfor %%}{{ '<|assistant|>' if add_generation_prompt }}"
TEMPLATES = {
    "as it is": EACH % "{{ m.content }}<|end|>",
    "line breaks around": EACH % "{{ '\n' + m.content + '\n' }}",
    "trimmed": EACH % "{{ m.content | trim }}<|end|>",
    "trimmed, then a space": EACH % "{{ ' ' + m.content.strip() + ' ' }}<|end|>",
    "line breaks trimmed": EACH % "{{ m.content.strip('\n') }}<|end|>",
    "written twice": EACH % "[{{ m.content }}]{{ m.content }}<|end|>",
    "cut at a tag": EACH % "{{ m.content.split('</think>')[-1] }}<|end|>",
    "reasoning taken out": EACH
    % "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0].split('<think>')[-1] }}</think>"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|end|>",
    "only users": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
}
CONTENTS = (
    *("", " ", "Yes", "Yes\n", "Yes\n\n", "Yes ", "  Yes", "\nYes\t"),  # white space
    *("<", "<|", "end", "<|end|>", "|>", "assistant", "user"),  # parts of tags
    *("Hi", "i", "Hi\n"),  # of an earlier message
    *("<think>", "<think>\n", "<think>a</think>", "a</think>b\n"),
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_ends_where_it_ends_in_transformers(name: str) -> None:
    made: list[str | None] = []
    for content, earlier in itertools.product(CONTENTS, ("Hi", "Yes")):
        messages = [{"role": "user", "content": earlier}, {"role": "assistant", "content": content}]
        expected = theirs(TEMPLATES[name], messages)
        assert ours(TEMPLATES[name], messages) == expected, (content, earlier)
        made.append(expected)
    assert name == "only users" or any(made)


def ours(template: str, messages: list[dict[str, Any]]) -> str | None:
    """Return the prompt; None if it is refused."""
    conversation = read_messages(messages, template)
    text = ChatTemplate(template).render(with_mark(conversation, MARK), False)
    try:
        return up_to_mark(text, MARK, conversation[-1]["content"])
    except RequestError:
        return None


def theirs(template: str, messages: list[dict[str, Any]]) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        made = render_jinja_template([messages], chat_template=template, continue_final_message=True)[0][0]
    except ValueError:
        return None
    return str(made).replace("CONTINUE_FINAL_MESSAGE_TAG ", "")  # which stays where a content is written twice


def test_calls_can_t_be_continued() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(RequestError, match="no content"):
        with_mark(read_messages([message]), MARK)
