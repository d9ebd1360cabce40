"""Over HTTP: reasoning before an answer of a given form, answers that continue a message, templates for tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.models import Shape
from tests.servers import LiveServer
from tests.tagged import write_tagged

TAGS, THINK, THOUGHT = ("<think>", "</think>"), 258, 259
TEMPLATE = """{%- for message in messages %}{{ '[' + message.role + ']' + message.content + '[end]' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}
{%- elif enable_thinking is defined %}{{ '<think>' }}{% endif %}{% endif -%}"""
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
FORM = {"structured_outputs": {"regex": "(yes|no)!{3}"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server of a model that has the tags as tokens, and a second template."""
    folder = tmp_path_factory.mktemp("reasoning")
    shapes = {"target": Shape(), "near": Shape(noise=0.1)}
    paths = [write_tagged(folder / name, TEMPLATE, TAGS, shape) for name, shape in shapes.items()]
    (folder / "target" / "additional_chat_templates").mkdir()
    (folder / "target" / "additional_chat_templates" / "tool_use.jinja").write_text(
        "<tool_call>TOOLS", encoding="utf-8"
    )
    live = LiveServer(AsyncEngine(paths[0], draft_model=paths[1], dtype="float32")).ready()
    yield live
    live.stop()


def answer(server: LiveServer, **body: Any) -> Any:
    settings = {"messages": CHAT, "max_completion_tokens": 60, "seed": 5, **FORM, **body}
    whole = server.post("/v1/chat/completions", **settings)["choices"][0]
    plain = server.post("/v1/chat/completions", **settings, speculation=False)["choices"][0]
    assert plain["message"] == whole["message"], "speculation changes nothing"
    chunks = server.chunks("/v1/chat/completions", **settings)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (whole["message"].get(name) or "")
    return whole["message"] | {"finish_reason": whole["finish_reason"]}


@pytest.mark.parametrize("seed", range(4))
def test_the_form_follows_the_reasoning(server: LiveServer, seed: int) -> None:
    likely = {str(THOUGHT): 6}
    variables = {"enable_thinking": True}
    message = answer(server, chat_template_kwargs=variables, logit_bias=likely, seed=seed)
    assert message["finish_reason"] == "stop"
    assert message["content"] in ("yes!!!", "no!!!")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    settings = {"structured_outputs": None, "response_format": form, "logit_bias": likely, "seed": seed}
    message = answer(server, chat_template_kwargs=variables, **settings)
    if message["finish_reason"] == "stop":
        assert json.loads(message["content"])["a"] in (1, 2)


def test_the_model_chooses_whether_to_reason(server: LiveServer) -> None:
    likely = {str(THINK): 50, str(THOUGHT): 50}  # repeatedly, until it ends
    thinks = [answer(server, logit_bias=likely, seed=seed) for seed in range(5)]
    assert {message["content"] for message in thinks} <= {"yes!!!", "no!!!"}
    assert {message.get("reasoning_content", "<think>")[:7] for message in thinks} == {"<think>"}
    assert any("reasoning_content" in message for message in thinks)
    does_not = answer(server, logit_bias={str(THINK): -100})
    assert "reasoning_content" not in does_not
    assert does_not["content"] in ("yes!!!", "no!!!")


def test_reasoning_can_be_switched_off(server: LiveServer) -> None:
    likely = {str(THINK): 90}
    for given in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"add_generation_prompt": False},
        {"reasoning_effort": "none"},
    ):
        message = answer(server, logit_bias=likely, **given)
        assert message["content"] in ("yes!!!", "no!!!")
        assert "reasoning_content" not in message


@pytest.mark.parametrize(("effort", "end"), [("none", "<think></think>"), ("low", "<think>"), (None, "[assistant]")])
def test_the_effort_reaches_the_template(server: LiveServer, effort: str | None, end: str) -> None:
    made = server.post("/tokenize", messages=CHAT, reasoning_effort=effort)
    assert server.post("/detokenize", tokens=made["tokens"])["prompt"].endswith(end)
    own = server.post(
        "/tokenize", messages=CHAT, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}
    )
    assert server.post("/detokenize", tokens=own["tokens"])["prompt"].endswith("<think></think>")


def test_an_unended_reasoning_is_the_whole_answer(server: LiveServer) -> None:
    message = answer(server, chat_template_kwargs={"enable_thinking": True}, logit_bias={str(THOUGHT): -100})
    assert (message["content"], message["finish_reason"]) == ("", "length")
    assert message["reasoning_content"]


def test_the_last_message_is_continued(server: LiveServer) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "I say "}]
    made = server.post("/tokenize", messages=messages, continue_final_message=True)
    prompt = server.post("/detokenize", tokens=made["tokens"])["prompt"]
    assert prompt == "[user]hi[end][assistant]I say "
    said = answer(server, messages=messages, continue_final_message=True)
    assert said["content"] in ("yes!!!", "no!!!")
    empty = server.post(
        "/tokenize", messages=[*CHAT, {"role": "assistant", "content": ""}], continue_final_message=True
    )
    assert server.post("/detokenize", tokens=empty["tokens"])["prompt"] == "[user]hi[end][assistant]"


def test_tools_have_their_own_template(server: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "cut", "parameters": SCHEMA}}]
    made = server.post("/tokenize", messages=CHAT, tools=tools)
    assert server.post("/detokenize", tokens=made["tokens"])["prompt"] == "<tool_call>TOOLS"
    body = {"messages": CHAT, "tools": tools, "max_completion_tokens": 120, "temperature": 0}
    choice = server.post("/v1/chat/completions", **body, tool_choice="required", parallel_tool_calls=False)["choices"][
        0
    ]
    if choice["finish_reason"] != "length":
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "cut"
    plain = server.post("/tokenize", messages=CHAT)
    assert server.post("/detokenize", tokens=plain["tokens"])["prompt"] == "[user]hi[end][assistant]"


OPENING = """{%- for message in messages %}{{ message.content }}{% endfor %}{{ '\\n<think>\\n' }}{# </think> #}"""
RESPONSE = {"input": "hi", "max_output_tokens": 60, "seed": 5}


@pytest.fixture(scope="module", params=["one token", "special", "several tokens"])
def opening(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Return a server of a model whose template ends every prompt with the start tag."""
    tags = () if request.param == "several tokens" else TAGS
    folder = tmp_path_factory.mktemp("opening") / "target"
    path = write_tagged(folder, OPENING, tags, Shape(), special=request.param == "special")
    live = LiveServer(AsyncEngine(path, dtype="float32")).ready()
    live.url += f"#{request.param}"
    yield live
    live.stop()


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}], ids=["", "not wanted"])
def test_a_form_is_content_where_the_template_opens_reasoning(opening: LiveServer, variables: dict[str, Any]) -> None:
    """The form and the reader of the answer agree on the place where reasoning begins."""
    likely = {} if opening.url.endswith("several tokens") else {str(THOUGHT): 6}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for given in ({"response_format": form, "structured_outputs": None}, FORM):
        message = answer(opening, logit_bias=likely, chat_template_kwargs=variables, **given)
        assert message["finish_reason"] == "stop"
        assert message["content"] in ('{"a":1}', '{"a":2}', "yes!!!", "no!!!")
        assert bool(message.get("reasoning_content")) == bool(likely)


def test_a_user_s_tag_opens_no_reasoning(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What is <think>"}]
    settings = {"messages": messages, "add_generation_prompt": False, **FORM, "max_completion_tokens": 60, "seed": 1}
    (choice,) = server.post("/v1/chat/completions", **settings)["choices"]
    assert choice["message"]["content"] in ("yes!!!", "no!!!")


def test_a_response_separates_its_reasoning(opening: LiveServer) -> None:
    likely = {} if opening.url.endswith("several tokens") else {str(THOUGHT): 6}
    settings = {**RESPONSE, **FORM, "logit_bias": likely}
    whole = opening.post("/v1/responses", **settings)
    items = {item["type"]: "".join(part["text"] for part in item["content"]) for item in whole["output"]}
    assert items["message"] in ("yes!!!", "no!!!")
    assert ("reasoning" in items) == bool(likely)
    used = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert bool(used) == bool(likely)
    events = [json.loads(each) for each in opening.events("/v1/responses", **settings)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for kind, item in (("reasoning", "reasoning"), ("output", "message")):
        deltas = "".join(each["delta"] for each in events if each["type"] == f"response.{kind}_text.delta")
        assert deltas == items.get(item, "")
    last = events[-1]["response"]
    for given in (last, whole):
        for item in given["output"]:
            item.pop("id")
    assert last["output"] == whole["output"]
    added = [each for each in events if each["type"] == "response.output_item.added"]
    assert [each["item"]["type"] for each in added] == [item["type"] for item in whole["output"]]


def test_a_cut_reasoning_is_the_whole_response(server: LiveServer) -> None:
    variables = {"enable_thinking": True}
    whole = server.post("/v1/responses", **RESPONSE, chat_template_kwargs=variables, logit_bias={str(THOUGHT): -100})
    assert [(item["type"], item["status"]) for item in whole["output"]] == [("reasoning", "incomplete")]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    plain = server.post("/v1/responses", **RESPONSE, chat_template_kwargs={"enable_thinking": False})
    assert [item["type"] for item in plain["output"]] == ["message"]


@pytest.mark.parametrize("limit", ["max_output_tokens", "max_tokens"])
def test_a_response_keeps_to_its_limit(server: LiveServer, limit: str) -> None:
    """max_tokens limits the answer, too."""
    whole = server.post("/v1/responses", **{"input": "hi", limit: 3})
    assert (whole["usage"]["output_tokens"], whole["max_output_tokens"], whole["status"]) == (3, 3, "incomplete")


def test_a_response_has_log_probabilities(server: LiveServer) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "logit_bias": {str(THINK): -100}}
    settings = {**RESPONSE, **FORM, **asked}
    whole = server.post("/v1/responses", **settings)
    (part,) = whole["output"][-1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]).startswith(part["text"])
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in part["logprobs"])
    events = [json.loads(each) for each in server.events("/v1/responses", **settings)]
    sent = [entry for each in events if each["type"] == "response.output_text.delta" for entry in each["logprobs"]]
    assert sent == part["logprobs"][: len(sent)]
    assert len(sent) >= len(part["text"])
    assert "logprobs" not in str(server.post("/v1/responses", **RESPONSE)["output"][0]["content"][0]["logprobs"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_logprobs", 3),
        ("logprobs", True),
        ("include", ["reasoning.encrypted_content", "reasoning.content"]),
        ("reasoning", {"effort": "low", "summary": "detailed"}),
        ("reasoning_effort", "low"),
        ("max_completion_tokens", 5),
        ("text", {"verbosity": "low"}),
        ("truncation", "always"),
        ("tools", [{"type": "custom", "name": "apply_patch"}]),
        ("tool_choice", "required"),
        ("prompt", {"id": "x"}),
        ("n", 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_that_a_response_can_t_honour_are_refused(server: LiveServer, field: str, value: Any) -> None:
    refused = server.http.post("/v1/responses", json={**RESPONSE, field: value})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
    ],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "store": False,
}
AGENTS: dict[str, Any] = {"input": "hi", "instructions": None, "tools": [], "metadata": {"a": "b"}}
WITHOUT_EFFECT: dict[str, Any] = {
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None},
    "text": {"verbosity": "medium", "format": {"type": "text"}},
    "truncation": "auto",
    "prompt_cache_key": "0199",
    "service_tier": "auto",
    "safety_identifier": "someone",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [CODEX, AGENTS], ids=["Codex", "Agents SDK"])
def test_fields_of_agents_that_change_nothing_are_accepted(server: LiveServer, body: Any, stream: bool) -> None:
    def output(**fields: Any) -> Any:
        asked = {**body, "max_output_tokens": 8, "temperature": 0, **fields}
        if not stream:
            return server.post("/v1/responses", **asked)["output"]
        return json.loads([*server.events("/v1/responses", **asked)][-1])["response"]["output"]

    plain, full = output(reasoning={"effort": "low"}), output(**WITHOUT_EFFECT)
    assert [item["content"] for item in full] == [item["content"] for item in plain]
    for name, value in WITHOUT_EFFECT.items():
        assert output(**{name: value})


def test_a_response_s_effort_reaches_the_template(server: LiveServer) -> None:
    whole = server.post("/v1/responses", **RESPONSE, reasoning={"effort": "low"}, chat_template_kwargs={})
    assert whole["reasoning"] == {"effort": "low", "summary": None}
