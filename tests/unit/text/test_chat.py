"""Chat templates render as in Hugging Face's libraries, and can do nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import ModelError, RequestError
from speculant.text import TOOL_USE, ChatTemplate, Tokenizer, find_template
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


def render(source: str, messages: Any = MESSAGES, **variables: Any) -> str:
    return ChatTemplate(source).render(messages, False, **variables)


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(byte_level().backend, SETTINGS, template)


def test_a_conversation_is_rendered() -> None:
    tokenizer = with_template(CHATML)
    text = "<s><|user|>Hi & <hello></s><|assistant|>Yes?</s>"
    assert tokenizer.apply_chat_template(MESSAGES) == text + "<|assistant|>"
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False) == text


def test_rendering_equals_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template([MESSAGES], chat_template=CHATML, bos_token="<s>", eos_token="</s>")
    assert render(CHATML, bos_token="<s>", eos_token="</s>") == theirs[0]


def test_the_template_s_own_error_reaches_the_user() -> None:
    with pytest.raises(RequestError, match="unknown role robot"):
        with_template(CHATML).apply_chat_template([{"role": "robot", "content": ""}])


@pytest.mark.parametrize("messages", [[{"content": "no role"}], [{"role": "user", "content": None}], ["text"]])
def test_messages_of_a_wrong_shape_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="can't render"):
        with_template(CHATML).apply_chat_template(messages)


def test_an_invalid_template_is_refused() -> None:
    with pytest.raises(ModelError, match="not valid"):
        with_template("{% for %}").apply_chat_template(MESSAGES)


def test_a_missing_template_is_explained() -> None:
    with pytest.raises(ModelError, match="no chat template"):
        with_template(None).apply_chat_template(MESSAGES)


def test_tojson_does_not_escape_html() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi & <hello>"}'
    assert render("{{ ['é'] | tojson(indent=1) }}") == '[\n "é"\n]'


def test_templates_can_format_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_generation_blocks_are_replaced_by_their_content() -> None:
    assert (
        render("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}")
        == "user"
    )


def test_variables_reach_the_template() -> None:
    assert with_template("{{ tone }}").apply_chat_template([], tone="dry") == "dry"


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
