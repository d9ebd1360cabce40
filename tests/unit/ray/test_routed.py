"""The text by which the router finds a replica."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculant.ray.routed import MOST_CHARACTERS, routed
from speculant.serving.process import InsideRequest

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "prompt", "input", "content", "text", "cache_salt", "instructions", "x"]),
            inner,
        )
    ),
    max_leaves=12,
)


def text(body: Any = None, key: str | None = None, raw: bytes | None = None, user: str | None = None) -> str:
    """Return the text of a body."""
    content = json.dumps(body).encode() if raw is None else raw
    request = InsideRequest("POST", "/v1/chat/completions", content, user=user)
    found = routed(request, key)
    assert found.request is request
    return found.prompt


def test_a_conversation_begins_as_its_earlier_turns() -> None:
    short = text({"messages": CHAT})
    longer = [*CHAT, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
    assert text({"messages": longer, "temperature": 0}).startswith(short)
    assert "Be brief." in short
    parts = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
    ]
    assert text({"messages": parts}) == short


def test_prompts_and_inputs_have_their_text() -> None:
    assert text({"prompt": "def f"}) == "def f"
    assert text({"prompt": ["def f", "def g"]}).startswith("def f")
    assert text({"input": "Hello.", "instructions": "Be brief."}) == "Be brief.\nHello."
    assert "Hello." in text({"input": CHAT})


def test_token_ids_share_their_beginnings() -> None:
    assert text({"prompt": [1, 22, 3, 4]}).startswith(text({"prompt": [1, 22, 3]}))
    assert not text({"prompt": [12, 2]}).startswith(text({"prompt": [1, 22]}))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"7", b"null", b"\xff", b"[" * 100_000, b"{}", b'{"prompt": ""}'])
def test_a_body_without_a_prompt_has_a_text(raw: bytes) -> None:
    assert text(raw=raw)
    assert text(raw=raw, key="sk-1")


def test_keys_and_salts_are_kept_apart() -> None:
    body = {"prompt": "def f"}
    salted = {**body, "cache_salt": "a"}
    texts = [
        text(body),
        *(text(body, key) for key in ("sk-1", "sk-2")),
        text(salted),
        text({**body, "cache_salt": "b"}),
        text(salted, "sk-1"),
        text({**body, "cache_salt": "\ud800"}),
        *(text(body, key, user=user) for key in (None, "sk-1") for user in ("a", "b")),
    ]
    assert len({each[:8] for each in texts}) == len(texts)
    assert not any("sk-" in each for each in texts), "a key is in the router's texts"
    assert text(salted, "sk-1") == text(salted, "sk-1")


def test_texts_are_bounded() -> None:
    assert len(text({"prompt": "x" * 100_000}, "sk-1")) == MOST_CHARACTERS


def test_a_deep_salt_is_ignored() -> None:
    raw = b'{"prompt": "def f", "cache_salt": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert text(raw=raw) == "def f"


@given(VALUES, st.none() | st.just("sk-1"))
def test_any_json_has_a_text(body: Any, key: str | None) -> None:
    assert 0 < len(text(body, key)) <= MOST_CHARACTERS
