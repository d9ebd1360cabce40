"""Messages are checked, and converted to the form that chat templates read."""

from __future__ import annotations

from typing import Any

import pytest

from speculant.errors import RequestError
from speculant.text.chat import ROLES, check_roles, check_variables, read_messages

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
