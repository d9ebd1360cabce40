"""Every documented request field of vLLM's and llama.cpp's servers is read, refused by name, or changes nothing."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from speculant.serving import ACCEPTED, BODIES, REFUSED, SETTINGS, GeneratingBody
from tests.documented_fields import NAMES, VALUES, value_of
from tests.servers import LiveServer

PROMPT = "def read(path):\n"
CHAT: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, **GREEDY},
    "/v1/chat/completions": {"messages": CHAT, **GREEDY},
    "/v1/responses": {"input": "hello", "temperature": 0, "max_output_tokens": 4},
    "/infill": {"input_prefix": PROMPT, "input_suffix": "\n", "temperature": 0, "n_predict": 4},
    "/v1/prefill": {"prompt": "a", "wait": True},
    "/tokenize": {"messages": CHAT},
    "/detokenize": {"tokens": [5, 6]},
}
GENERATING = [path for path, kind in BODIES.items() if issubclass(kind, GeneratingBody)]

# Tests that show that fields other than settings of `SamplingParams` are read.
READ = {
    **dict.fromkeys(["model", "seed"], "test_openai_client.py"),
    **dict.fromkeys(["stream", "stream_options", "logprobs", "top_logprobs", "prediction"], "test_openai_client.py"),
    **dict.fromkeys(["response_format", "text"], "test_openai_client.py"),
    **dict.fromkeys(["messages", "tools", "tool_choice", "add_special_tokens", "documents"], "test_fields.py"),
    **dict.fromkeys(["add_generation_prompt", "chat_template_kwargs", "reasoning_effort"], "test_fields.py"),
    **dict.fromkeys(["continue_final_message", "truncate_prompt_tokens", "truncation_side"], "test_fields.py"),
    **dict.fromkeys(["return_token_ids", "return_token_strs", "echo", "max_completion_tokens"], "test_fields.py"),
    **dict.fromkeys(["max_output_tokens", "best_of", "suffix", "prompt", "instructions", "input"], "test_fields.py"),
    **dict.fromkeys(["skip_special_tokens", "structured_outputs", "cache_salt", "priority"], "test_fields.py"),
    **dict.fromkeys(["modalities", "tokens", "parallel_tool_calls"], "test_fields.py"),
    **dict.fromkeys(["include", "reasoning", "truncation"], "test_reasoning_forms.py"),
    "metadata": "test_fields.py",
    **dict.fromkeys(["input_prefix", "input_suffix", "input_extra", "n_predict", "n_indent"], "test_infill.py"),
    **dict.fromkeys(["t_max_predict_ms", "samplers", "response_fields", "id_slot"], "test_infill.py"),
    **dict.fromkeys(["previous_response_id", "store", "background", "max_tool_calls"], "test_responses.py"),
}


def outcome(demo: LiveServer, path: str, name: str) -> str:
    """Return the outcome of a field: refused by name, read, ignored, or dropped."""
    kind, base, value = BODIES[path], BASES[path], value_of(name, path)
    if name in kind.model_fields:
        return "read" if name in READ or name in SETTINGS else "unproven"
    reply = demo.http.post(path, json={**base, name: value})
    if reply.status_code == 400:
        return "refused" if reply.json()["error"]["param"] == name else f"refused as {reply.json()['error']}"
    assert reply.status_code == 200, reply.text
    return "ignored" if _content(reply.json()) == plain(demo, path) else "dropped"


@lru_cache
def plain(demo: LiveServer, path: str) -> Any:
    return _content(demo.post(path, **BASES[path]))


def _content(answer: Any) -> Any:
    if "choices" in answer:
        return [{**choice, "finish_reason": None} for choice in answer["choices"]]
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    return answer.get("content", answer)


@pytest.mark.parametrize("name", NAMES)
def test_a_documented_field_is_never_dropped(demo: LiveServer, name: str) -> None:
    for path in BODIES:
        found = outcome(demo, path, name)
        if path not in GENERATING:
            assert found in ("read", "refused", "ignored"), (path, found)
        elif name in ACCEPTED:
            assert found in ("read", "ignored"), (path, found)
        else:
            assert found in ("read", "refused"), (path, found)


def test_each_field_of_the_table_belongs_to_a_route() -> None:
    assert [
        name for name in (*REFUSED, *ACCEPTED) if name not in NAMES and name not in {"detokenize", "tool_choice"}
    ] == []
    assert [name for name in VALUES if name not in NAMES] == []


def test_the_proof_that_a_field_is_read_names_it() -> None:
    folder = Path(__file__).parent
    for name, file in READ.items():
        text = (folder / file).read_text(encoding="utf-8").split("# --- fields that are read", 1)[-1]
        assert re.search(rf"\b{name}\b", text), (name, file)


@pytest.mark.parametrize(
    ("sent", "advice"),
    [
        ({"logprobs": True}, 'use include=["message.output_text.logprobs"] and top_logprobs.'),
        ({"max_completion_tokens": 4}, "use max_output_tokens."),
        ({"prompt": {"id": "stored"}}, "send the conversation as input."),
        ({"messages": CHAT}, "use input."),
        ({"reasoning_effort": "low"}, 'use reasoning={"effort": ...}.'),
    ],
)
def test_a_response_names_its_fields_for_those_of_a_chat(demo: LiveServer, sent: Any, advice: str) -> None:
    reply = demo.http.post("/v1/responses", json={**BASES["/v1/responses"], **sent})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(sent))
    assert reply.json()["error"]["message"].endswith(advice)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("value", [None, False])
def test_a_field_without_effect_is_accepted(demo: LiveServer, path: str, value: Any) -> None:
    off = {"mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0, "truncation": "disabled", "n_predict": -1}
    demo.post(path, **{**BASES[path], **off}, guided_json=value, grammar="", logits_processors=[])


@pytest.mark.parametrize("path", GENERATING)
def test_unknown_fields_are_ignored(demo: LiveServer, path: str) -> None:
    assert _content(demo.post(path, **BASES[path], surprise=[1])) == plain(demo, path)


def test_a_field_of_another_route_is_refused(demo: LiveServer) -> None:
    reply = demo.http.post("/v1/completions", json={**BASES["/v1/completions"], "max_completion_tokens": 2})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "max_completion_tokens")
    assert error["message"] == "max_completion_tokens is a field of /v1/chat/completions only."


# --- fields that are read


def test_a_text_with_a_first_token_gets_no_second_one(demo: LiveServer) -> None:
    text = "<|endoftext|>" + PROMPT
    plain = demo.post("/v1/completions", prompt=PROMPT, **GREEDY)["usage"]["prompt_tokens"]
    without = demo.post("/v1/completions", prompt=text, add_special_tokens=False, **GREEDY)
    assert without["usage"]["prompt_tokens"] == plain
    assert demo.post("/v1/completions", prompt=text, **GREEDY)["usage"]["prompt_tokens"] == plain + 1
    chat = demo.post("/tokenize", messages=CHAT)["count"]
    assert demo.post("/tokenize", messages=CHAT, add_special_tokens=True)["count"] == chat + 1
    asked = demo.post("/v1/chat/completions", messages=CHAT, add_special_tokens=True, **GREEDY)
    assert asked["usage"]["prompt_tokens"] == chat + 1


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_prompt_is_cut(demo: LiveServer, side: str | None) -> None:
    tokens = demo.post("/tokenize", prompt=PROMPT)["tokens"]
    kept = tokens[:3] if side == "right" else tokens[-3:]
    asked = {"truncate_prompt_tokens": 3, "truncation_side": side, "return_token_ids": True}
    for prompt in (PROMPT, tokens):
        answer = demo.post("/v1/completions", prompt=prompt, echo=True, **asked, **GREEDY)["choices"][0]
        assert answer["prompt_token_ids"] == kept
        assert answer["text"].startswith(demo.post("/detokenize", tokens=kept, skip_special_tokens=True)["prompt"])
    assert demo.post("/tokenize", prompt=PROMPT, truncate_prompt_tokens=3, truncation_side=side)["tokens"] == kept


@pytest.mark.parametrize(
    ("path", "fields", "answer"),
    [
        ("/v1/completions", {}, 16),
        ("/v1/completions", {"max_tokens": 4}, 4),
        ("/v1/chat/completions", {"max_completion_tokens": 4}, 4),
        ("/v1/chat/completions", {}, 1),
    ],
)
def test_a_prompt_is_cut_to_the_context(demo: LiveServer, path: str, fields: dict[str, Any], answer: int) -> None:
    text = "x y " * 2000
    asked = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    made = demo.post(path, **asked, truncate_prompt_tokens=-1, ignore_eos=True, **fields)["usage"]
    assert (made["prompt_tokens"], made["completion_tokens"]) == (1024 - answer, answer)


def test_a_conversation_is_cut_on_the_left(demo: LiveServer) -> None:
    answer = demo.post("/v1/chat/completions", messages=CHAT, truncate_prompt_tokens=3, return_token_ids=True, **GREEDY)
    assert answer["prompt_token_ids"] == demo.post("/tokenize", messages=CHAT)["tokens"][-3:]
    for wrong in ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, {"truncate_prompt_tokens": -2}):
        reply = demo.http.post("/v1/chat/completions", json={"messages": CHAT, **GREEDY, **wrong})
        assert reply.json()["error"]["param"] == list(wrong)[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_are_returned_in_one_piece_and_streamed(demo: LiveServer, path: str) -> None:
    base = {**BASES[path], "return_token_ids": True}
    whole, chunks = demo.post(path, **base), demo.chunks(path, **base)
    choice = whole["choices"][0]
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    choices = [each for chunk in chunks for each in chunk["choices"]]
    assert [token for each in choices for token in each.get("token_ids", [])] == choice["token_ids"]
    prompts = [each["prompt_token_ids"] for each in (*chunks, *choices) if "prompt_token_ids" in each]
    assert prompts == [choice.get("prompt_token_ids") or whole["prompt_token_ids"]]
    assert len(prompts[0]) == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_has_the_usage(demo: LiveServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = demo.chunks(path, stream_options=options, **BASES[path])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    plain = demo.chunks(path, stream_options={"include_usage": True}, **BASES[path])
    assert {str(chunk["usage"]) for chunk in plain[:-1]} == {"None"}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": {"enum": [17]}},
        {"type": "json_schema", "schema": {"enum": [17]}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [17]}}},
    ],
)
def test_a_schema_is_read_where_it_stands(demo: LiveServer, form: dict[str, Any]) -> None:
    asked = {"messages": CHAT, "temperature": 0, "max_tokens": 32}
    answer = demo.post("/v1/chat/completions", response_format=form, **asked)
    assert answer["choices"][0]["message"]["content"].strip() == "17"
    same = demo.post("/v1/chat/completions", structured_outputs={"json": {"enum": [17]}}, **asked)
    assert same["choices"][0]["message"]["content"].strip() == "17"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"suffix": "x", "prompt": [5, 6]}, "suffix"),
        ("/v1/completions", {"suffix": "x", "echo": True}, "echo"),
        ("/v1/completions", {"suffix": "x", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ("/infill", {"n": 2}, "n"),
        ("/infill", {"samplers": ["top_k", "best"]}, "samplers"),
        ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
        ("/v1/completions", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/responses", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/responses", {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
def test_fields_that_a_route_can_t_honour_are_refused(
    demo: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = demo.http.post(path, json={**BASES[path], **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_limits_have_a_name_on_each_route(demo: LiveServer) -> None:
    chat = demo.post("/v1/chat/completions", messages=CHAT, temperature=0, max_completion_tokens=2)
    assert chat["usage"]["completion_tokens"] == 2
    answer = demo.post("/v1/responses", input="hello", instructions="be brief", temperature=0, max_output_tokens=2)
    assert answer["usage"]["output_tokens"] == 2
    assert demo.post("/v1/responses", input="hello", max_output_tokens=1, metadata={"a": "b"})["metadata"] == {"a": "b"}


def test_tokenize_makes_the_prompt_of_a_chat(demo: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in (
        {"add_generation_prompt": False},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"documents": [{"text": "x"}]},
        {"tools": [tool], "tool_choice": "none", "parallel_tool_calls": False},
    ):
        count = demo.post("/tokenize", messages=CHAT, **fields)["count"]
        answer = demo.post("/v1/chat/completions", messages=CHAT, **fields, **GREEDY)
        assert answer["usage"]["prompt_tokens"] == count
    assert len(demo.post("/tokenize", prompt=PROMPT, return_token_strs=True)["token_strs"]) > 1


def test_special_tokens_are_left_out_of_decoded_text_on_request(demo: LiveServer) -> None:
    tokens = demo.post("/tokenize", prompt=PROMPT)["tokens"]
    assert demo.post("/detokenize", tokens=tokens, skip_special_tokens=True) == {"prompt": PROMPT}
    assert demo.post("/detokenize", tokens=tokens) == {"prompt": "<|endoftext|>" + PROMPT}


def test_a_salt_and_a_priority_are_read(demo: LiveServer) -> None:
    def cached(**fields: Any) -> int:
        usage = demo.post("/v1/completions", prompt=PROMPT * 20, **fields, **GREEDY)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached(cache_salt="one")
    assert cached(cache_salt="one") > 0
    assert cached(cache_salt="two") == 0
    reply = demo.http.post("/v1/completions", json={**BASES["/v1/completions"], "priority": "x"})
    assert reply.json()["error"]["param"] == "priority"


SALTED = {path: base for path, base in BASES.items() if "cache_salt" in BODIES[path].model_fields}


@pytest.mark.parametrize("path", SALTED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_salt_that_could_be_the_engine_s_own_is_refused(demo: LiveServer, path: str, stream: bool) -> None:
    reply = demo.http.post(path, json={**SALTED[path], "cache_salt": "s\0long", "stream": stream})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "cache_salt"), reply.text
