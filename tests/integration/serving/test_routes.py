"""The routes that OpenAI does not have, and this server's own fields."""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest

from speculant import AsyncEngine, __version__
from tests.models import Checkpoints, checkpoints
from tests.servers import LiveServer

__all__ = ["checkpoints"]

PROMPT = "def read(path):\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
CHAT: list[Any] = [{"role": "user", "content": "hello"}]


def test_detokenize_reverses_tokenize(demo: LiveServer) -> None:
    text = "def f(x):\n    return 'ä€😀'"
    made = demo.post("/tokenize", prompt=text, return_token_strs=True)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 1024
    assert demo.post("/detokenize", tokens=made["tokens"]) == {"prompt": "<|endoftext|>" + text}
    bare = demo.post("/tokenize", prompt=text, add_special_tokens=False)
    assert bare["tokens"] == made["tokens"][1:]
    rendered = demo.post("/tokenize", messages=CHAT)
    prompt = demo.post("/detokenize", tokens=rendered["tokens"])["prompt"]
    assert prompt.endswith("# user:\nhello\n\n# assistant:\n")
    answer = demo.post("/v1/chat/completions", messages=CHAT, **GREEDY)
    assert answer["usage"]["prompt_tokens"] == rendered["count"]


def test_content_parts_are_joined(demo: LiveServer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert demo.post("/tokenize", messages=[{"role": "user", "content": parts}]) == demo.post(
        "/tokenize", messages=CHAT
    )
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    refused = demo.http.post("/tokenize", json={"messages": [{"role": "user", "content": image}]})
    assert refused.status_code == 400


def test_version_and_metrics_are_served(demo: LiveServer) -> None:
    assert demo.http.get("/version").json() == {"version": __version__}
    demo.post("/v1/completions", prompt=PROMPT, **GREEDY)
    page = demo.http.get("/metrics").text
    for name in (
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "generation_tokens_total",
        "prompt_tokens_total",
        "prefix_cache_hits_total",
        "num_requests_running",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
    ):
        assert f"\nspeculant:{name}" in page
    assert 'speculant:request_success_total{engine="0",finished_reason="length"' in page
    assert 'spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"}' in page


def test_speculation_is_switched_per_request(demo: LiveServer) -> None:
    on = demo.post("/v1/completions", prompt=PROMPT, **GREEDY)
    off = demo.post("/v1/completions", prompt=PROMPT, speculation=False, **GREEDY)
    assert off["choices"][0]["text"] == on["choices"][0]["text"]
    assert off["metrics"]["speculative_decoding"] is None
    figures = on["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == len(figures["per_step_drafted"]) == len(figures["per_step_accepted"])
    assert figures["num_draft_tokens"] == sum(figures["per_step_drafted"])
    assert figures["num_accepted_draft_tokens"] == sum(figures["per_step_accepted"]) > 0
    assert 1 < figures["tokens_per_pass"] <= on["usage"]["completion_tokens"] / figures["num_spec_steps"]


def test_no_answer_contains_end_tokens(demo: LiveServer) -> None:
    """The token is counted and has a log-probability; whole and streamed answers agree."""
    full = demo.post("/v1/completions", prompt=PROMPT, logprobs=0, **GREEDY)["choices"][0]
    place = next(i for i, text in enumerate(full["logprobs"]["tokens"]) if i > 2 and text.strip())
    text = full["logprobs"]["tokens"][place]
    (stop,) = demo.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
    place = full["logprobs"]["tokens"].index(text)
    before = "".join(full["logprobs"]["tokens"][:place])
    fields = {"prompt": PROMPT, **GREEDY, "stop_token_ids": [stop], "logprobs": 0}
    for include, expected in ((False, before), (True, before + text)):
        answer = demo.post("/v1/completions", **fields, include_stop_str_in_output=include)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
        assert choice["logprobs"]["tokens"] == full["logprobs"]["tokens"][: place + 1]
        assert choice["logprobs"]["text_offset"] == full["logprobs"]["text_offset"][: place + 1]
        assert answer["usage"]["completion_tokens"] == place + 1
        chunks = demo.chunks("/v1/completions", **fields, include_stop_str_in_output=include)
        assert "".join(each["text"] for chunk in chunks for each in chunk["choices"]) == expected


@pytest.mark.parametrize("usage", [True, False])
def test_the_last_chunk_has_the_figures_of_speculation(demo: LiveServer, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        *others, last = demo.chunks(path, **asked, **GREEDY, **options)
        assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
        assert bool(last["choices"]) is not usage
        assert not any("metrics" in chunk for chunk in others)
        assert all(chunk["choices"] for chunk in others)


@pytest.mark.parametrize("given", [[], [{"role": "user"}], [{"type": "reasoning"}], [{"role": 1, "content": "a"}]])
def test_input_without_text_is_refused(demo: LiveServer, given: list[Any]) -> None:
    assert demo.http.post("/v1/responses", json={"input": given}).status_code == 400


def test_chunks_mark_drafted_tokens(demo: LiveServer) -> None:
    chunks = demo.chunks("/v1/completions", prompt=PROMPT, speculant={"tokens": True}, **GREEDY)
    tokens = [token for chunk in chunks for token in chunk.get("speculant_tokens", [])]
    assert len(tokens) == 24
    assert {token["drafted"] for token in tokens} == {True, False}
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert "".join(token["text"] for token in tokens) == text
    plain = demo.chunks("/v1/completions", prompt=PROMPT, **GREEDY)
    assert not any("speculant_tokens" in chunk for chunk in plain)


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": -100}, "seed": 1},
        {"min_tokens": 4, "stop_token_ids": [0], "ignore_eos": True, "skip_special_tokens": False},
        {"stop": ["\n"], "include_stop_str_in_output": True},
        {"prompt_logprobs": 1},
        {"beam_width": 3, "length_penalty": 0.5, "n": 2},
        {"speculation": {"num_speculative_tokens": 2}},
        {"cache_salt": "mine", "priority": 3, "user": "somebody", "metadata": {"a": "b"}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_fields_of_the_library_are_accepted(demo: LiveServer, field: dict[str, Any]) -> None:
    answer = demo.post("/v1/completions", prompt=PROMPT, max_tokens=8, **field)
    assert len(answer["choices"]) == field.get("n", 1)
    chat = demo.post("/v1/chat/completions", messages=CHAT, max_completion_tokens=8, **field)
    assert len(chat["choices"]) == field.get("n", 1)
    if "prompt_logprobs" in field:
        entries = answer["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == answer["usage"]["prompt_tokens"]
        assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_a_stop_string_ends_the_text(demo: LiveServer) -> None:
    whole = demo.post("/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    stop = whole[3:6]
    answer = demo.post("/v1/completions", prompt=PROMPT, stop=stop, **GREEDY)["choices"][0]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]


def test_usage_counts_cached_tokens(demo: LiveServer) -> None:
    prompt = "this prompt comes twice and is long enough to fill some blocks of the cache " * 3
    first, again = (demo.post("/v1/completions", prompt=prompt, **GREEDY)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] > 16
    other = demo.post("/v1/completions", prompt=prompt, cache_salt="other", **GREEDY)["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


def test_request_ids_are_echoed(demo: LiveServer) -> None:
    assert demo.http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert demo.http.get("/health", headers={"X-Request-Id": "x" * 500}).headers["x-request-id"] != "x" * 500
    assert demo.http.get("/nothing").headers["x-request-id"]


def test_unknown_routes_have_openai_s_errors(demo: LiveServer) -> None:
    missing, wrong = demo.http.get("/v2/things"), demo.http.get("/v1/completions")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    for response in (missing, wrong):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/embeddings"), ("POST", "/v1/audio/speech"), ("GET", "/v1/chat/completions/chatcmpl-1"),
     ("GET", "/v1/conversations"), ("GET", "/v1/responses/resp_1/things"), ("GET", "/" + "x" * 5000)],
    ids=lambda value: value[:30],
)  # fmt: skip
def test_a_404_lists_the_routes_that_exist(demo: LiveServer, method: str, path: str) -> None:
    reply = demo.http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["code"]) == (404, "not_found_error", "unknown_url")
    assert f"There is no route {method} '{path[:80]}'" in error["message"]
    paths = demo.http.get("/openapi.json").json()["paths"]
    for known, operations in paths.items():
        for name in operations:
            assert f" {name.upper()} {known}" in error["message"]
    assert "/openapi.json" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("POST", "/health", "GET, HEAD"), ("PUT", "/ping", "GET, POST, HEAD"),
     ("POST", "/v1/responses/resp_1", "DELETE, GET, HEAD"), ("DELETE", "/v1/responses/resp_1/cancel", "POST")],
)  # fmt: skip
def test_a_405_has_the_methods_of_the_route(demo: LiveServer, method: str, path: str, allowed: str) -> None:
    reply = demo.http.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    assert allowed.split(", ")[0] in reply.json()["error"]["message"]


def test_the_load_counts_the_sequences(demo: LiveServer) -> None:
    demo.until(lambda: demo.http.get("/load").json() == {"server_load": 0})
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with demo.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert "cmpl-" in next(lines)
        assert demo.http.get("/load").json() == {"server_load": 2}
    demo.until(lambda: demo.http.get("/load").json() == {"server_load": 0})


def test_the_properties_are_llama_cpp_s(demo: LiveServer) -> None:
    found = demo.http.get("/props").json()
    assert (found["model_path"], found["total_slots"]) == ("demo", 8)
    general = found["default_generation_settings"]
    assert (general["n_ctx"], general["speculative"]) == (1024, True)
    assert general["params"]["temperature"] >= 0
    assert "messages" in found["chat_template"]


def test_ping_is_health_and_other_routes_need_the_key(serve: Any, checkpoints: Checkpoints) -> None:
    server: LiveServer = serve(AsyncEngine(checkpoints.target), api_keys=("secret",))
    server.until(lambda: server.http.get("/ping").status_code == 200)
    assert server.http.post("/ping").status_code == 200
    for path in ("/load", "/props", "/v1/nothing", "/v1/responses/resp_1"):
        assert server.http.get(path).status_code == 401


def test_the_last_chunk_has_the_stop_reason(demo: LiveServer) -> None:
    for path, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        (choice,) = demo.post(path, **asked, **GREEDY)["choices"]
        stop = (choice.get("text") or choice["message"]["content"])[3:6]
        for fields, reason in (({"stop": stop}, stop), ({}, None)):
            choices = [each for chunk in demo.chunks(path, **asked, **GREEDY, **fields) for each in chunk["choices"]]
            assert choices[-1]["stop_reason"] == reason
            assert not any("stop_reason" in choice for choice in choices[:-1])


def test_each_sample_s_last_chunk_has_its_stop_reason(demo: LiveServer) -> None:
    sampled = {"prompt": PROMPT, "n": 4, "seed": 1, "max_tokens": 60, "stop": ["(", "e"]}
    whole = demo.post("/v1/completions", **sampled)["choices"]
    choices = [each for chunk in demo.chunks("/v1/completions", **sampled) for each in chunk["choices"]]
    last = {each["index"]: each["stop_reason"] for each in choices if each["finish_reason"]}
    assert last == {each["index"]: each["stop_reason"] for each in whole}
    assert len(last) == 4


def test_roles_reach_the_template(demo: LiveServer) -> None:
    def prompt(*messages: dict[str, Any]) -> str:
        tokens = demo.post("/tokenize", messages=messages)["tokens"]
        text: str = demo.post("/detokenize", tokens=tokens)["prompt"]
        return text

    assert "critic" in prompt(*CHAT, {"role": "critic", "content": "hm"})
    assert prompt({"role": "developer", "content": "x"}) == prompt({"role": "system", "content": "x"})
    refused = {"role": "assistant", "refusal": "no"}
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert prompt(*CHAT, refused) == prompt(*CHAT, part) == prompt(*CHAT, {"role": "assistant", "content": "no"})
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    reply = demo.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]})
    assert "image_url" in reply.json()["error"]["message"]


def test_a_chat_s_choice_may_allow_some_tools(demo: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("cut", "sew")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools[1:]}}
    settings = {**GREEDY, "max_tokens": 80, "messages": CHAT, "tools": tools, "tool_choice": allowed}
    (choice,) = demo.post("/v1/chat/completions", **settings)["choices"]
    assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"sew"}
    assert choice["finish_reason"] == "tool_calls"
    custom, hosted = {"type": "custom", "custom": {"name": "f"}}, {"type": "web_search"}
    for wrong in (custom, hosted):
        reply = demo.http.post("/v1/chat/completions", json={**settings, "tools": [wrong], "tool_choice": "required"})
        assert (reply.status_code, str(wrong["type"]) in reply.json()["error"]["message"]) == (400, True)


def test_the_openapi_document_has_the_bodies(demo: LiveServer) -> None:
    document = demo.http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    assert "messages" in document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"]


def test_a_tool_choice_requires_a_call(demo: LiveServer) -> None:
    parameters = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
    tools = [{"type": "function", "function": {"name": "cut", "parameters": parameters}}]
    settings = {**GREEDY, "max_tokens": 80, "messages": CHAT, "tools": tools}
    refused = demo.http.post("/v1/chat/completions", json={**settings, "tool_choice": {"type": "function"}})
    assert refused.status_code == 400
    (choice,) = demo.post("/v1/chat/completions", **settings, tool_choice="required")["choices"]
    (call,) = choice["message"]["tool_calls"][:1]  # the template has no format of calls
    assert (call["function"]["name"], choice["message"]["content"]) == ("cut", None)
    assert json.loads(call["function"]["arguments"])["size"] in (1, 2)


def test_the_tokenizer_s_settings_are_encoded_once(demo: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have megabytes, and anybody may ask for them without an end."""
    first = demo.http.get("/tokenizer_info")
    monkeypatch.setattr("speculant.serving.openai.service.encode_in_parts", None)
    assert demo.http.get("/tokenizer_info").content == first.content
    assert first.json()["tokenizer_class"]


@pytest.mark.parametrize(
    "path",
    ["/health", "/v1/models", "/v1/models/demo", "/metrics", "/version", "/", "/page.js", "/openapi.json", "/nowhere",
     "/tokenizer_info", "/ping", "/props", "/v1/responses/resp_1"],
)  # fmt: skip
def test_head_is_answered_as_get_without_the_body(demo: LiveServer, path: str) -> None:
    got, head = demo.http.get(path), demo.http.head(path)
    assert (head.status_code, head.headers["content-type"]) == (got.status_code, got.headers["content-type"])
    assert head.content == b""
    assert path == "/metrics" or head.headers["content-length"] == got.headers["content-length"]
    assert demo.http.get("/health").status_code == 200  # the connection can go on


def test_a_compressed_body_is_refused_by_name(demo: LiveServer) -> None:
    body = gzip.compress(json.dumps({"prompt": PROMPT}).encode())
    reply = demo.http.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert reply.status_code == 415
    assert "gzip" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"prompt": "x y " * 2000}, "prompt"),
        ("/v1/completions", {"logprobs": 1000}, "logprobs"),
        ("/v1/completions", {"stop_token_ids": [10**6]}, "stop_token_ids"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x y " * 2000}]}, "messages"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "schema": {"type": "x"}}},
            "response_format",
        ),
        ("/v1/chat/completions", {"speculation": {"verification": "x"}}, "speculation"),
        ("/v1/responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"input": "x y " * 2000}, "input"),
    ],
)
def test_an_error_uses_the_field_name_that_was_sent(
    demo: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    bases = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": CHAT}}
    reply = demo.http.post(path, json={**bases.get(path, {"input": PROMPT}), **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    name = re.match(r"[a-z]\w*", error["message"])
    assert name is None or name[0] == param or param == "speculation"  # of that, the key is named


def test_the_model_is_found_by_each_name(serve: Any, checkpoints: Checkpoints) -> None:
    given = str(checkpoints.target)
    server: LiveServer = serve(AsyncEngine(given), served_model_names=("mine", "other")).ready()
    for name in ("mine", "other", given):
        answer = server.post("/v1/completions", prompt=[1, 2], model=name, max_tokens=1)
        assert answer["model"] == name
    assert [model["id"] for model in server.http.get("/v1/models").json()["data"]] == ["mine", "other"]
    assert server.http.post("/v1/completions", json={"prompt": [1], "model": "foreign"}).status_code == 404
