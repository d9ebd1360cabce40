"""A last message that the answer continues is rendered as transformers renders it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from speculant.errors import RequestError
from speculant.text.chat import ChatTemplate, read_messages, up_to_mark, with_mark

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
