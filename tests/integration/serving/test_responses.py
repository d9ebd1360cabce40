"""Responses with tools, responses that continue others, and stored ones: OpenAI's client, keys, hostile requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from speculant import AsyncEngine, Client
from speculant.serving import ResponseStore
from tests.openai_schema import Check, Recorder
from tests.raw_clients import Connection, encoded
from tests.servers import LiveServer, ServerProcess, serve_process
from tests.tagged import CALLS_TEMPLATE, write_tagged

__all__ = ["serve_process"]

PARAMETERS = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}},
    "required": ["size"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("cut", "sew")]
CALL = '<tool_call>\n{"name": "sew", "arguments": {"size": 2}}\n</tool_call>'
THINK, THOUGHT = 258, 259
PLAIN: dict[str, Any] = {"model": "model", "temperature": 0, "max_output_tokens": 200}
AT_ONCE = {"logit_bias": {str(THINK): -100}}  # without reasoning
THINKING = {"logit_bias": {str(THOUGHT): 4}, "chat_template_kwargs": {"enable_thinking": True}, "seed": 5}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a small model whose template has calls, and reasoning between two tokens."""
    return write_tagged(tmp_path_factory.mktemp("responses") / "model", CALLS_TEMPLATE, ("<think>", "</think>"))


@pytest.fixture(scope="module")
def live(checkpoint: str) -> Iterator[LiveServer]:
    server = LiveServer(AsyncEngine(checkpoint, dtype="float32"), served_model_names=("model",)).ready()
    yield server
    server.stop()


@pytest.fixture
def client(live: LiveServer, conforms: Check) -> Iterator[Any]:
    """Return OpenAI's client; all of its answers are validated."""
    recorder = Recorder()
    with httpx.Client(transport=recorder) as http:
        yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=30, http_client=http)
    recorder.check(conforms)


def writing(text: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a response that has this text."""
    extra = {"structured_outputs": {"choice": [text]}, **more.pop("extra_body", AT_ONCE)}
    return {**PLAIN, **more, "extra_body": extra}


def store_of(server: LiveServer) -> ResponseStore:
    store: ResponseStore = server.app.state.stored
    return store


def checked(response: Any) -> Any:
    """Return a response that has exactly the types of OpenAI's."""
    Response.model_validate(json.loads(response.to_json()))
    return response


def streamed(client: Any, **fields: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream, which are checked, and its response."""
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(json.loads(event.to_json()))
    return events, events[-1].response


def without_ids(items: Any) -> list[dict[str, Any]]:
    found = [item if isinstance(item, dict) else json.loads(item.to_json()) for item in items]
    return [{name: each for name, each in item.items() if name not in ("id", "call_id")} for item in found]


# --- tools


def test_a_forced_call_has_a_form_of_its_own(client: Any) -> None:
    """The format is that of a text, and clients send it with forced calls too."""
    settings = {**PLAIN, "input": "hi", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (plain,) = client.responses.create(**settings, extra_body=AT_ONCE).output
    (call,) = client.responses.create(**settings, text={"format": {"type": "json_object"}}, extra_body=AT_ONCE).output
    assert (call.name, call.arguments) == (plain.name, plain.arguments)


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "name": "sew"},
     {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sew"}]}],
    ids=["required", "named", "allowed"],
)  # fmt: skip
def test_a_forced_call_is_an_item(client: Any, choice: Any) -> None:
    settings = {**PLAIN, "input": "hi", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    settings["extra_body"] = AT_ONCE
    whole = checked(client.responses.create(**settings))
    (call,) = whole.output
    assert (call.type, call.status, whole.status) == ("function_call", "completed", "completed")
    assert call.id.startswith("fc_")
    assert call.call_id.startswith("call_")
    assert call.name in (("cut", "sew") if choice == "required" else ("sew",))
    assert json.loads(call.arguments)["size"] in (1, 2)
    assert (whole.parallel_tool_calls, len(whole.tools)) == (False, 2)
    events, last = streamed(client, **settings)
    assert without_ids(last.output) == without_ids(whole.output)
    kinds = [event.type for event in events if event.type != "response.function_call_arguments.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == events[-3].arguments == call.arguments
    assert events[2].item.arguments == ""
    assert events[2].item.call_id == last.output[0].call_id


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("plain text", ["message"]),
        (CALL, ["function_call"]),
        (f"I will {CALL}", ["message", "function_call"]),
        (f"{CALL}\n{CALL}", ["function_call", "function_call"]),
        (f"so {CALL} and {CALL} it is", ["message", "function_call", "message", "function_call", "message"]),
        ("<tool_call> is no call", ["message"]),
    ],
)
def test_a_model_chooses_to_call(client: Any, text: str, kinds: list[str]) -> None:
    logprobs = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    settings = writing(text, input="hi", tools=TOOLS, **logprobs)
    whole = checked(client.responses.create(**settings))
    assert [item.type for item in whole.output] == kinds
    for item in whole.output:
        if item.type == "function_call":
            assert (item.name, json.loads(item.arguments)) == ("sew", {"size": 2})
        else:
            (part,) = item.content
            tokens = "".join(entry.token for entry in part.logprobs)
            assert part.text.strip() in tokens
            assert "arguments" not in tokens
    events, last = streamed(client, **settings)
    assert without_ids(last.output) == without_ids(whole.output)
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [(event.output_index, event.item.type) for event in added] == list(enumerate(kinds))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.output]


def test_reasoning_precedes_text_and_call(client: Any) -> None:
    settings = writing(f"well {CALL}", input="hi", tools=TOOLS, max_output_tokens=400, extra_body=THINKING)
    settings["temperature"] = 1
    whole = checked(client.responses.create(**settings))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    _, last = streamed(client, **settings)
    assert without_ids(last.output) == without_ids(whole.output)


def test_a_call_that_is_cut_off_is_incomplete(client: Any) -> None:
    settings = writing(CALL, input="hi", tools=TOOLS, max_output_tokens=len(CALL) - 20)
    whole = checked(client.responses.create(**settings))
    (call,) = whole.output
    assert (whole.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
    events, last = streamed(client, **settings)
    assert events[-1].type == "response.incomplete"
    assert without_ids(last.output) == without_ids(whole.output)


def test_a_format_leaves_calls_to_the_model(live: LiveServer, client: Any) -> None:
    """JSON of the format or calls: forbidding the first character of either leaves the other."""
    form = {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}
    settings = {**PLAIN, "input": "hi", "tools": TOOLS, "text": {"format": form}}
    for character, kind in (("{", "function_call"), ("<", "message")):
        (token,) = live.post("/tokenize", prompt=character, add_special_tokens=False)["tokens"]
        bias = {str(token): -100, str(THINK): -100}
        whole = checked(client.responses.create(**settings, extra_body={"logit_bias": bias}))
        assert whole.output[0].type == kind
        if kind == "message":
            assert json.loads(whole.output_text)["size"] in (1, 2)


def test_a_stream_is_parsed_by_openai_s_helper(client: Any) -> None:
    settings = writing(f"I will {CALL}", input="hi", tools=[{**TOOLS[1], "strict": True}])
    with client.responses.stream(**settings) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output[1].arguments
    assert final.output[1].parsed_arguments == {"size": 2}
    assert final.output_text == "I will"


def test_tokens_are_listed_once_each(live: LiveServer) -> None:
    extra = {**AT_ONCE, "speculant": {"tokens": True}}
    body = {"input": "hi", "tools": TOOLS, "structured_outputs": {"choice": [f"a {CALL} b"]}, "max_output_tokens": 200}
    events = [json.loads(each) for each in live.events("/v1/responses", **body, **extra)]
    tokens = [token["text"] for event in events for token in event.get("speculant_tokens", ())]
    assert "".join(tokens) == f"a {CALL} b"
    assert len(tokens) == events[-1]["response"]["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, None),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "glue"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"id": "msg_unknown"}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"text": {"format": "json"}}, "text"),
        ({"text": {"format": {"type": "text", "more": [[]] * 20_001}}}, "text"),
        ({"tools": [{**TOOLS[0], "parameters": {"enum": [[1]] * 10_000}}], "tool_choice": "none"}, "tools"),
    ],
)
def test_other_fields_are_refused_by_name(live: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    reply = live.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 4, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


# --- fields that are read


def test_a_conversation_goes_on(client: Any, live: LiveServer) -> None:
    """A tool loop by previous_response_id has the prompt, and the answer, of the whole conversation in one request."""
    first = client.responses.create(**writing(f"I will {CALL}", input="hi", tools=TOOLS, instructions="Be brief."))
    call = first.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = {"tools": TOOLS, "max_output_tokens": 12}
    second = checked(client.responses.create(**{**PLAIN, **after}, input=[output], previous_response_id=first.id))
    assert second.previous_response_id == first.id
    given = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), output]
    whole = client.responses.create(**{**PLAIN, **after}, input=given)
    assert (second.output_text, second.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I will", "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": "sew", "arguments": call.arguments}}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": tool["name"], "parameters": PARAMETERS}} for tool in TOOLS]
    prompt = live.post("/tokenize", messages=chat, tools=tools)
    assert prompt["count"] == second.usage.input_tokens
    third = client.responses.create(**{**PLAIN, **after}, input="and?", previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_reasoning_is_part_of_the_conversation(client: Any) -> None:
    first = client.responses.create(**writing("yes", input="hi", temperature=1, extra_body=THINKING))
    (thought, answer) = first.output
    second = client.responses.create(**{**PLAIN, "max_output_tokens": 5}, input="so?", previous_response_id=first.id)
    given = [{"role": "user", "content": "hi"}, thought.to_dict(), answer.to_dict(), {"role": "user", "content": "so?"}]
    whole = client.responses.create(**{**PLAIN, "max_output_tokens": 5}, input=given)
    assert second.usage.input_tokens == whole.usage.input_tokens
    bare = client.responses.create(**{**PLAIN, "max_output_tokens": 5}, input=[given[0], *given[2:]])
    assert bare.usage.input_tokens == whole.usage.input_tokens - len(thought.content[0].text.encode()) - 2


def test_items_are_named_by_reference(client: Any) -> None:
    first = client.responses.create(**writing("yes", input=[{"id": "msg_mine", "role": "user", "content": "hi"}]))
    named = [{"type": "item_reference", "id": name} for name in ("msg_mine", first.output[0].id)]
    second = client.responses.create(**writing("no", input=[*named, {"role": "user", "content": "so?"}]))
    third = client.responses.create(**writing("no", input="so?", previous_response_id=first.id))
    assert second.usage.input_tokens == third.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_unless_store_is_false(client: Any, live: LiveServer, stream: bool) -> None:
    settings = writing("yes", input="hi", metadata={"a": "b"}, max_tool_calls=2)
    whole = streamed(client, **settings)[1] if stream else client.responses.create(**settings)
    assert (whole.store, whole.max_tool_calls, whole.background) == (True, 2, False)
    again = checked(client.responses.retrieve(whole.id))
    assert again.to_dict() == whole.to_dict()
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(whole.id)
    client.responses.delete(whole.id)
    before = len(store_of(live))
    gone = client.responses.create(**settings, store=False).id
    assert len(store_of(live)) == before
    for name in (whole.id, gone, "resp_unknown"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(name)
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list(name)
        with pytest.raises(openai.BadRequestError, match="was not found"):
            client.responses.create(**PLAIN, input="x", previous_response_id=name)


def test_a_stored_response_is_not_streamed(client: Any) -> None:
    whole = client.responses.create(**writing("yes", input="hi"))
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        client.responses.retrieve(whole.id, stream=True)


def test_input_items_are_listed_by_pages(client: Any, live: LiveServer) -> None:
    first = client.responses.create(**writing("yes", input=[{"role": "user", "content": str(n)} for n in range(5)]))
    second = client.responses.create(**writing("no", input="so?", previous_response_id=first.id))
    page = client.responses.input_items.list(first.id, order="asc", limit=2)
    assert [item.content[0].text for item in page.data] == ["0", "1"]
    assert (page.has_more, page.data[-1].id) == (True, page.last_id)
    assert [item.content[0].text for item in page] == ["0", "1", "2", "3", "4"], "the client follows the pages"
    texts = [item.content[0].text for item in client.responses.input_items.list(second.id)]
    assert texts == ["so?", "yes", "4", "3", "2", "1", "0"]
    path = f"/v1/responses/{second.id}/input_items"
    listed = live.http.get(path, params={"limit": 100}).json()
    ResponseItemList.model_validate(listed)
    assert (listed["has_more"], listed["first_id"]) == (False, listed["data"][0]["id"])
    for wrong in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"limit": "9" * 5000}, {"order": "up"}, {"after": "x"}):
        reply = live.http.get(path, params=wrong)  # type: ignore[arg-type]
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(wrong)))
    last = {"after": listed["data"][-1]["id"]}
    assert live.http.get(path, params=last).json()["data"] == []


# --- in the background


def until(client: Any, response_id: str, *statuses: str) -> Any:
    deadline = time.monotonic() + 20
    while (found := client.responses.retrieve(response_id)).status not in statuses:
        assert time.monotonic() < deadline, found.status
        time.sleep(0.01)
    return checked(found)


def test_a_response_is_made_in_the_background(client: Any) -> None:
    settings = writing(f"I will {CALL}", input="hi", tools=TOOLS)
    begun = checked(client.responses.create(**settings, background=True))
    assert begun.status in ("queued", "in_progress")
    assert (begun.output, begun.background) == ([], True)
    assert client.responses.input_items.list(begun.id).data[0].content[0].text == "hi"
    done = until(client, begun.id, "completed")
    assert without_ids(done.output) == without_ids(client.responses.create(**settings).output)
    assert client.responses.cancel(begun.id).to_dict() == done.to_dict(), "it is complete"
    client.responses.create(**writing("x", input="so?", previous_response_id=begun.id, tools=TOOLS))


LONG: dict[str, Any] = {**PLAIN, "max_output_tokens": 900, "input": "hi", "background": True}


def test_a_response_in_the_background_is_cancelled(client: Any, live: LiveServer) -> None:
    begun = client.responses.create(**LONG, extra_body={"ignore_eos": True})
    with pytest.raises(openai.BadRequestError, match="can't be continued"):
        client.responses.create(**PLAIN, input="x", previous_response_id=begun.id)
    cancelled = checked(client.responses.cancel(begun.id))
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert client.responses.cancel(begun.id).status == client.responses.retrieve(begun.id).status == "cancelled"
    deleted = client.responses.create(**LONG, extra_body={"ignore_eos": True})
    client.responses.delete(deleted.id)
    live.until(lambda: live.state.admission.count == 0)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


def test_errors_of_the_request_are_its_own_answer(live: LiveServer) -> None:
    before = len(store_of(live))
    for wrong in ({"input": [{"role": "nobody at all", "content": "x"}]}, {"input": [{"type": "reasoning"}]}):
        reply = live.http.post("/v1/responses", json={**LONG, **wrong})
        assert reply.status_code == 400
    live.until(lambda: live.state.admission.count == 0)
    with live.state.admission.admit(live.state.admission.most, Client("address:127.0.0.1")):
        assert live.http.post("/v1/responses", json=LONG).status_code == 429
    assert len(store_of(live)) == before


def test_an_error_of_the_generation_is_stored(client: Any) -> None:
    begun = client.responses.create(**{**LONG, "input": "x" * 2000})
    failed = until(client, begun.id, "failed")
    assert failed.error.code == "invalid_prompt"
    assert failed.error.message


# --- clients and hostility


def test_a_response_belongs_to_its_key(serve: Any, checkpoint: str) -> None:
    server = serve(AsyncEngine(checkpoint, dtype="float32"), api_keys=("one", "two")).ready()
    mine, other = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    body = {"input": "hi", "max_output_tokens": 2}
    made = server.http.post("/v1/responses", json=body, headers=mine).json()
    path = f"/v1/responses/{made['id']}"
    unknown = path[:-4] + "0000"
    for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        foreign, absent = (server.http.request(method, each + rest, headers=other) for each in (path, unknown))
        assert (foreign.status_code, absent.status_code) == (404, 404)
        assert foreign.text.replace(path[-36:], "") == absent.text.replace(unknown[-36:], ""), "they say the same"
        assert server.http.request(method, path + rest).status_code == 401
    for wrong in ({"previous_response_id": made["id"]}, {"input": [{"id": made["output"][0]["id"]}]}):
        assert server.http.post("/v1/responses", json={**body, **wrong}, headers=other).status_code == 400
        assert server.http.post("/v1/responses", json={**body, **wrong}, headers=mine).status_code == 200
    assert server.http.get(path, headers=mine).json() == made


def test_nothing_is_stored_on_request_of_the_operator(serve: Any, checkpoint: str) -> None:
    server = serve(AsyncEngine(checkpoint, dtype="float32"), max_stored_bytes=0).ready()
    made = server.post("/v1/responses", input="hi", max_output_tokens=2, store=True)
    assert made["store"] is False
    assert server.http.get(f"/v1/responses/{made['id']}").status_code == 404
    assert server.http.post("/v1/responses", json={"input": "hi", "background": True}).status_code == 400


def test_stored_bytes_stay_within_their_bound(serve: Any, checkpoint: str) -> None:
    server = serve(AsyncEngine(checkpoint, dtype="float32"), max_stored_bytes=100_000, response_ttl=1.0).ready()
    store = store_of(server)
    body = {"input": "hi", "max_output_tokens": 1, "metadata": {str(n): "y" * 500 for n in range(4)}}
    made = [server.post("/v1/responses", **body)["id"] for _ in range(20)]
    store.check()
    assert 0 < store.total <= 100_000 // 4
    assert server.http.get(f"/v1/responses/{made[0]}").status_code == 404
    assert server.http.get(f"/v1/responses/{made[-1]}").status_code == 200
    server.until(lambda: len(store) == 0)
    assert store.total == 0


def test_requests_in_the_background_count_as_stored(serve: Any, checkpoint: str) -> None:
    """The connection is closed, and the body stays in memory until the answer is complete."""
    engine = AsyncEngine(checkpoint, dtype="float32", max_num_seqs=1)
    server = serve(engine, max_stored_bytes=4 * 2**20).ready()
    body = {**LONG, "model": None, "user": "x" * 200_000, "ignore_eos": True}
    made = [server.post("/v1/responses", **body)["id"] for _ in range(12)]
    assert store_of(server).total <= 2**20
    server.until(lambda: server.state.admission.count <= 2)
    assert server.http.get(f"/v1/responses/{made[-1]}").status_code == 200
    too_large = server.http.post("/v1/responses", json={**body, "user": "x" * 600_000})
    assert (too_large.status_code, too_large.json()["error"]["param"]) == (400, "background")
    assert server.http.get(f"/v1/responses/{made[-1]}").status_code == 200


def test_a_stream_that_is_cut_leaves_nothing(live: LiveServer) -> None:
    before = len(store_of(live))
    body = {**PLAIN, "input": "hi", "ignore_eos": True, "max_output_tokens": 900, "stream": True}
    with live.http.stream("POST", "/v1/responses", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        name = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    live.until(lambda: live.state.admission.count == 0)
    assert len(store_of(live)) == before
    assert live.http.get(f"/v1/responses/{name}").status_code == 404


def test_a_long_chain_is_bounded_as_a_body_is(serve: Any, checkpoint: str) -> None:
    server = serve(AsyncEngine(checkpoint, dtype="float32"), max_messages=9, max_body_bytes=4000).ready()
    name, sizes = None, []
    for _ in range(4):
        made = server.post("/v1/responses", input="x", max_output_tokens=1, previous_response_id=name)
        name, sizes = made["id"], [*sizes, made["usage"]["input_tokens"]]
    assert sizes == sorted(set(sizes))
    more = {"input": [{"role": "user", "content": "x"}] * 2, "previous_response_id": name}
    reply = server.http.post("/v1/responses", json=more)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "input")
    assert "10 items" in reply.json()["error"]["message"]
    server.post("/v1/responses", input=[{"id": "msg_long", "role": "user", "content": "x" * 600}], max_output_tokens=1)
    reply = server.http.post("/v1/responses", json={"input": [{"id": "msg_long"}] * 8})
    assert reply.json()["error"]["code"] == "too_long"
    store_of(server).check()


@pytest.mark.slow
def test_clients_that_read_nothing_fill_no_memory(serve_process: Any, checkpoint: str) -> None:
    """Each of 30 clients asks for 12 stored megabytes, which are more than the system keeps, and reads none of them."""
    server: ServerProcess = serve_process(checkpoint, "--dtype", "float32", "--max-body-bytes", str(2**24)).ready()
    tool = {"type": "function", "name": "f", "description": "x" * 12_000_000}
    body = {"input": "hi", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none"}
    made = server.http.post("/v1/responses", json=body).json()
    path = f"/v1/responses/{made['id']}"
    assert len(server.http.get(path).content) > 12_000_000
    before = server.memory

    async def ask() -> int:
        async with AsyncExitStack() as stack:
            for _ in range(30):
                connection = await stack.enter_async_context(Connection(server.url, buffer=4096))
                await connection.send(encoded(path))
            await asyncio.sleep(2)
            return server.memory - before

    assert asyncio.run(ask()) < 64 * 2**20, "a fifth of their answers"


def test_concurrent_deletes_delete_once(live: LiveServer) -> None:
    name = live.post("/v1/responses", input="hi", max_output_tokens=1)["id"]
    together = threading.Barrier(8)

    def delete(_: int) -> int:
        together.wait()
        return httpx.delete(f"{live.url}/v1/responses/{name}", trust_env=False).status_code

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(delete, range(8))) == [200] + [404] * 7
    store_of(live).check()
