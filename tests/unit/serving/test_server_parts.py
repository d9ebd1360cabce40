"""Parts of the server: options, admission, threads for texts, figures, texts of tokens, readers of messages."""

from __future__ import annotations

import json
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from speculant.errors import ConfigError
from speculant.metrics import SpeculationMetrics
from speculant.serving import (
    API_KEY,
    LARGE,
    LOWEST,
    USER,
    Admission,
    ApiError,
    MessageReader,
    ReasoningParser,
    ServerOptions,
    TextLanes,
    TokenTexts,
    chat_logprob,
    completion_logprobs,
    encode,
    event,
    find_format,
    joined_calls,
    prompt_logprobs,
    salt_of,
)
from speculant.text import Tokenizer
from speculant.types import Client, Logprob
from tests.models import Checkpoints

# --- options, admission, JSON


@pytest.mark.parametrize(
    "given",
    [{"port": -1}, {"port": 70_000}, {"metrics_prefix": "a b"}, {"per_request_spec_decode_metrics": "all"},
     {"max_body_bytes": 0}, {"queue_timeout": -1.0}, {"api_keys": ("",)}, {"api_keys": ("é",)},
     {"max_messages": 16_385}, {"max_messages": 0}, {"max_large_texts": 0}, {"max_stored_bytes": -1},
     {"max_connections_per_address": -1}, {"max_buffered_bytes": 2**20}, {"trusted_proxies": ("10.0.0.0.0",)},
     {"client_header": "X-User"}, {"client_header": "X User", "trusted_proxies": ("10.0.0.7",)},
     {"client_header": "", "trusted_proxies": ("10.0.0.7",)}, {"access_log": "xml"},
     {"otlp_endpoint": "localhost:4318"}, {"otlp_endpoint": "http://["}, {"tool_parser": "no"},
     {"api_keys": (" k",)}, {"api_keys": ("k", "k ")}, {"max_connections": 0}, {"header_timeout": 0.0},
     {"trusted_proxies": ("*",)}, {"trusted_proxies": ("10.0.0.1/8",)}, {"trusted_proxies": ("proxy.example",)},
     {"priority_range": (3, -3)}],
    ids=str,
)  # fmt: skip
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerOptions(**given)


def test_none_means_no_deadline() -> None:
    assert ServerOptions(queue_timeout=None).queue_timeout is None


def test_admission_counts_and_refuses() -> None:
    admission = Admission(3)
    with admission.admit(2):
        with pytest.raises(ApiError) as caught, admission.admit(2):
            pass
        assert (caught.value.status, caught.value.headers) == (429, {"retry-after": "1"})
        with suppress(LookupError), admission.admit(1):
            assert admission.count == 3
            raise LookupError
        assert admission.count == 2
    assert admission.count == 0


def test_admission_leaves_each_client_its_share() -> None:
    """One client has every place, and later ones get their parts all the same: a half, a third, and one at least."""
    admission, one = Admission(6), Client("one")

    def is_full(client: Client, sequences: int) -> bool:
        try:
            with admission.admit(sequences, client):
                return False
        except ApiError as error:
            return error.status == 429

    with admission.admit(6, one):
        assert is_full(one, 1)
        with admission.admit(3, Client("two")):
            assert is_full(Client("two"), 1)
            assert (is_full(Client("three"), 2), is_full(Client("three"), 3)) == (False, True)
            assert (is_full(Client("heavy", 4.0), 4), is_full(Client("light", 0.001), 1)) == (False, False)
            assert admission.count == 9
    assert not is_full(one, 6)
    with pytest.raises(ApiError) as caught, admission.admit(7, one):
        pass
    assert (caught.value.status, caught.value.param) == (400, "n")


@pytest.mark.parametrize("text", ["plain", "ä€😀", "\ud800", '"\\\n\x00'])
def test_json_encodes_any_text(text: str) -> None:
    assert json.loads(encode({"text": text}))["text"] == text
    assert event({"text": text}).count(b"\n") == 2


def test_salts_differ_by_key_and_hide_it() -> None:
    scopes = [{API_KEY: key, USER: user} for key in (None, "one", "two") for user in (None, "a", "b")]
    salts = {salt_of(scope, own) for scope in scopes for own in (None, "", "mine", "/a:", "a")}
    assert len(salts) == 9 * 4
    assert not any("one" in salt or "two" in salt for salt in salts)
    assert salt_of({}, None) == "", "clients without keys share a cache with each other"


# --- figures of a request


def test_a_request_keeps_its_steps() -> None:
    metrics, other = SpeculationMetrics(), SpeculationMetrics()
    metrics.record(4, 2, 3)
    other.record(1, 0, 1)
    metrics.add(other)
    assert metrics.steps() == {"per_step_accepted": [2, 0], "per_step_drafted": [4, 1]}
    assert "per_step_drafted" not in metrics.to_dict()


# --- texts of tokens


@pytest.fixture
def texts(checkpoints: Checkpoints) -> TokenTexts:
    return TokenTexts(Tokenizer.from_folder(Path(checkpoints.target)))


def test_bytes_of_tokens_make_the_text(texts: TokenTexts, checkpoints: Checkpoints) -> None:
    tokens = Tokenizer.from_folder(Path(checkpoints.target)).encode("aä€😀")
    pieces = [texts.of(token) for token in tokens]
    assert b"".join(bytes(data or []) for _, data in pieces).decode() == "aä€😀"
    assert pieces[0] == ("a", [97])
    assert pieces[1] == ("bytes:\\xc3", [0xC3])
    assert texts.of(256) == ("<end>", list(b"<end>"))
    assert texts.of(260) == ("", None)  # a row of the head without a token


def test_both_shapes_of_logprobs(texts: TokenTexts) -> None:
    a, b = 64, 65
    entry = {a: Logprob(-2.0, 2), b: Logprob(-0.5, 1)}
    chat = chat_logprob(texts, a, entry, 1)
    assert (chat["logprob"], len(chat["top_logprobs"])) == (-2.0, 1)
    assert chat["top_logprobs"][0]["logprob"] == -0.5
    assert chat_logprob(texts, a, entry, 0)["top_logprobs"] == []
    assert json.loads(encode(completion_logprobs(texts, [a], [entry], [7]))) == {
        "tokens": [texts.of(a)[0]],
        "token_logprobs": [-2.0],
        "top_logprobs": [{texts.of(a)[0]: -2.0, texts.of(b)[0]: -0.5}],
        "text_offset": [7],
    }


def test_the_likeliest_of_tokens_with_one_text_counts(texts: TokenTexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "of", lambda token: ("same", None))
    entry = {5: Logprob(-2.0, 3), 6: Logprob(-0.5, 1), 7: Logprob(-1.0, 2)}
    shown = json.loads(encode(completion_logprobs(texts, [5], [entry], [0])))
    assert shown["top_logprobs"] == [{"same": -0.5}]
    assert shown["token_logprobs"] == [-2.0]


def test_impossible_tokens_have_a_finite_logprob(texts: TokenTexts) -> None:
    never = Logprob(float("-inf"), 9, "x")
    assert chat_logprob(texts, 5, {5: never}, 0)["logprob"] == LOWEST
    assert json.loads(encode(prompt_logprobs([None, {5: never}]))) == [
        None, {"5": {"logprob": LOWEST, "rank": 9, "decoded_token": "x"}},
    ]  # fmt: skip
    assert prompt_logprobs(None) is None


# --- messages


def test_a_reader_separates_reasoning_content_and_calls() -> None:
    text = '<think>hm</think>I call.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    hermes = find_format(None, "hermes")
    assert hermes is not None
    reader = MessageReader(ReasoningParser(), hermes())
    deltas = [reader.feed(character).as_delta() for character in text] + [reader.finish().as_delta()]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == reader.message.reasoning == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == reader.message.content == "I call."
    (call,) = joined_calls(reader.message.calls)
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    streamed = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert streamed[0]["id"] == call["id"]
    assert "".join(each["function"]["arguments"] for each in streamed) == '{"x": 1}'
    assert 0 < reader.reasoning_tokens < len(text)


def test_without_parsers_all_is_content() -> None:
    reader = MessageReader()
    assert reader.feed("<think>a").as_delta() == {"content": "<think>a"}
    assert reader.finish().as_delta() == {}
    assert reader.reasoning_tokens == 0


PATIENCE = 30.0


def test_a_client_may_have_as_many_small_texts_as_requests() -> None:
    """As many as wait in an engine by default: a burst of one client is served."""
    lanes, go = TextLanes(most_large=1), threading.Event()
    held = [lanes.submit("a", 1, lambda: go.wait(PATIENCE)) for _ in range(1024)]
    with pytest.raises(ApiError, match="At most 1024 requests") as caught:
        lanes.submit("a", 1, lambda: None)
    assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "1")
    go.set()
    assert all(each.result(PATIENCE) for each in held)
    lanes.close()


def test_closed_lanes_cancel_what_waits() -> None:
    lanes, go, begun = TextLanes(most_large=3), threading.Event(), threading.Event()
    first = lanes.submit("a", 1, lambda: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    waiting = lanes.submit("a", 1, lambda: None)
    lanes.close()
    with pytest.raises(CancelledError):
        waiting.result(PATIENCE)
    for size in (1, LARGE + 1):
        with pytest.raises(ApiError) as caught:
            lanes.submit("b", size, lambda: None)
        assert caught.value.status == 503
    go.set()
    assert first.result(PATIENCE)


def test_work_ahead_delays_no_text_of_a_request() -> None:
    """Nor does it take one of its client's places."""
    lanes, go, begun = TextLanes(most_large=1), threading.Event(), threading.Event()
    ahead = lanes.submit_ahead("a", lambda: (begun.set(), go.wait(PATIENCE)))
    assert begun.wait(PATIENCE)
    assert not lanes.is_busy
    held = threading.Event()
    for size in (1, LARGE + 1):
        assert lanes.submit("a", size, lambda: "read").result(PATIENCE) == "read"
        held.clear()
        waiting = lanes.submit("b", size, lambda: held.wait(PATIENCE))
        assert lanes.is_busy
        held.set()
        assert waiting.result(PATIENCE)
    assert not ahead.done()
    go.set()
    lanes.close()


def test_small_work_does_not_wait_for_large() -> None:
    lanes, go, begun = TextLanes(most_large=2), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        go.wait(PATIENCE)

    large = lanes.submit("a", LARGE + 1, wait)
    assert begun.wait(PATIENCE)
    assert lanes.submit("a", LARGE, lambda: "small").result(PATIENCE) == "small"
    assert not large.done()
    lanes.submit("a", LARGE + 1, lambda: None)
    with pytest.raises(ApiError):
        lanes.submit("a", LARGE + 1, lambda: None)
    go.set()
    lanes.close()
