"""Several models in one server: requests choose, models are loaded when asked for, and put away within a bound."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from speculant import LLM, AsyncEngine, SamplingParams
from speculant.engine import FairSteps
from speculant.errors import ConfigError, ModelError
from speculant.serving import BODIES, ModelSource
from tests.commands import error_of, invoke
from tests.models import Shape, write_checkpoint
from tests.servers import LiveServer, ServerProcess, serve, serve_process

__all__ = ["serve", "serve_process"]

SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_num_seqs": 4, "max_num_batched_tokens": 64}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [f"{number} tents" for number in range(4)]
CHATS = "/v1/chat/completions"


@dataclass
class Loaded:
    """The engines of models that a test names, and the order of their loads."""

    folders: dict[str, str]
    size: int = 0  # of each, as it is expected
    more: dict[str, Any] = field(default_factory=dict)  # settings
    steps: FairSteps = field(default_factory=FairSteps)
    loads: list[str] = field(default_factory=list)
    engines: list[weakref.ref[AsyncEngine]] = field(default_factory=list)
    before: Callable[[str], None] = lambda name: None

    def sources(self) -> list[ModelSource]:
        return [
            ModelSource((name, folder), self._loader(name), lambda: self.size) for name, folder in self.folders.items()
        ]

    def _loader(self, name: str) -> Callable[[], AsyncEngine]:
        def load() -> AsyncEngine:
            self.before(name)
            engine = AsyncEngine(self.folders[name], steps=self.steps, **SETTINGS, **self.more)
            self.loads.append(name)
            self.engines.append(weakref.ref(engine))
            return engine

        return load

    @property
    def alive(self) -> int:
        return sum(each() is not None for each in self.engines)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models of one size, with other texts."""
    made = tmp_path_factory.mktemp("models")
    return {name: write_checkpoint(made / name, Shape(seed=seed)) for seed, name in enumerate("ab", 1)}


@pytest.fixture(scope="module")
def texts(folders: dict[str, str]) -> dict[tuple[str, str], str]:
    """The text of each model for each prompt, as each gives it alone."""
    found = {}
    for name, folder in folders.items():
        llm = LLM(folder, **SETTINGS)
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
        found |= {(name, prompt): each.outputs[0].text for prompt, each in zip(PROMPTS, outputs, strict=True)}
    assert len({*found.values()}) > len(PROMPTS), "the models' texts are the same"
    return found


@pytest.fixture(scope="module")
def size(folders: dict[str, str]) -> int:
    """The bytes of one engine."""
    engine = AsyncEngine(folders["a"], **SETTINGS)
    asyncio.run(engine.shutdown(drain=False))
    return engine.memory_bytes


def wait_for(event: threading.Event) -> None:
    event.wait(20)


def states(server: LiveServer) -> dict[str, str]:
    return {each["id"]: each["state"] for each in server.http.get("/v1/models").json()["data"]}


def alternate(server: LiveServer, texts: dict[tuple[str, str], str]) -> None:
    """Ask from eight clients, whole and streamed, each in its own order; every answer is that of its model alone."""

    def ask(number: int) -> None:
        name, prompt = "ab"[number % 2], PROMPTS[number // 2 % 4]
        body = {"model": name, "prompt": prompt, **GREEDY}
        if number % 3:
            text = server.post("/v1/completions", **body)["choices"][0]["text"]
        else:
            text = "".join(each["choices"][0]["text"] for each in server.chunks("/v1/completions", **body))
        assert text == texts[name, prompt], (name, prompt)

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, range(24)))


def test_a_model_that_was_put_away_reads_prompts_from_disk(
    serve: Any, folders: dict[str, str], texts: dict[tuple[str, str], str], size: int, tmp_path: Path
) -> None:
    more = {"prompt_cache": tmp_path / "prompts", "learn": tmp_path / "learned", "block_size": 4}
    loaded = Loaded(folders, size, more)
    server = serve(loaded.sources(), memory=int(1.5 * size)).ready()
    for turn in range(2):
        for name in "ab":
            answer = server.post("/v1/completions", model=name, prompt=PROMPTS[0], **GREEDY)
            assert answer["choices"][0]["text"] == texts[name, PROMPTS[0]]
            assert bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == bool(turn)
    assert loaded.loads == ["a", "b", "a", "b"]


def test_two_models_alternate_in_the_room_of_one(
    serve: Any, folders: dict[str, str], texts: dict[tuple[str, str], str], size: int
) -> None:
    loaded, alone = Loaded(folders, size), list[int]()

    def before(name: str) -> None:
        gc.collect()
        alone.append(loaded.alive)

    loaded.before = before
    server = serve(loaded.sources(), memory=int(1.5 * size)).ready()
    alternate(server, texts)
    assert {*loaded.loads} == {"a", "b"}
    assert len(loaded.loads) > 2, "nothing was put away under load"
    assert [a != b for a, b in zip(loaded.loads, loaded.loads[1:], strict=False)] == [True] * (len(loaded.loads) - 1)
    assert not any(alone), "an engine was still there when the next one was loaded"
    assert sorted(states(server).values()) == ["loaded", "unloaded"]


def test_a_model_whose_prompt_is_read_ahead_can_be_put_away(
    serve: Any,
    folders: dict[str, str],
    texts: dict[tuple[str, str], str],
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("speculant.engine.engine.Engine._prepare", lambda engine: time.sleep(0.01))
    loaded = Loaded(folders, size)
    server = serve(loaded.sources(), memory=int(1.5 * size), queue_timeout=5).ready()
    with ThreadPoolExecutor(1) as clients:
        body = {"model": "a", "prompt": [3] * 40, "wait": True}
        reading = clients.submit(server.http.post, "/v1/prefill", json=body)
        server.until(lambda: states(server)["a"] == "loaded")
        answer = server.post("/v1/completions", model="b", prompt=PROMPTS[0], **GREEDY)
        assert answer["choices"][0]["text"] == texts["b", PROMPTS[0]]
        reply = reading.result(20)
    assert (reply.status_code, reply.json()["cached_tokens"]) == (200, 0)


def test_models_that_fit_stay(
    serve: Any, folders: dict[str, str], texts: dict[tuple[str, str], str], size: int
) -> None:
    loaded = Loaded(folders)
    server = serve(loaded.sources(), memory=2 * size).ready()
    alternate(server, texts)
    assert sorted(loaded.loads) == ["a", "b"]


def test_the_first_requests_for_a_model_share_its_load(
    serve: Any, folders: dict[str, str], texts: dict[tuple[str, str], str]
) -> None:
    go, loaded = threading.Event(), Loaded(folders)
    loaded.before = lambda name: wait_for(go)
    server = serve(loaded.sources(), memory="1GiB").ready()
    assert states(server) == {"a": "unloaded", "b": "unloaded"}
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(server.post, "/v1/completions", model="b", prompt=PROMPTS[0], **GREEDY) for _ in "1234"]
        server.until(lambda: states(server)["b"] == "loading")
        assert server.http.get("/health").status_code == 200
        go.set()
        assert {each.result()["choices"][0]["text"] for each in asked} == {texts["b", PROMPTS[0]]}
    assert (loaded.loads, states(server)) == (["b"], {"a": "unloaded", "b": "loaded"})
    unloaded, own = server.http.get("/v1/models").json()["data"]
    assert own.keys() - unloaded.keys() == {"max_model_len", "chat", "speculation"}
    assert server.post("/v1/completions", prompt=PROMPTS[1], **GREEDY)["choices"][0]["text"] == texts["a", PROMPTS[1]]
    assert loaded.loads == ["b", "a"], "without a model the first one answers"


def test_errors_name_the_models_and_the_log_has_the_reason(
    serve: Any, folders: dict[str, str], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, broken = Loaded(folders, size), [True]

    def before(name: str) -> None:
        if broken and name == "b":
            broken.pop()
            raise ModelError("the folder is gone", "bring it back.")

    loaded.before = before
    server = serve(loaded.sources(), memory=int(1.5 * size)).ready()
    unknown = server.http.post("/v1/completions", json={"model": "c", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "'a', 'b' do" in unknown.json()["error"]["message"]
    failed = server.http.post("/v1/completions", json={"model": "b", "prompt": "x"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "load_failed")
    assert failed.json()["error"]["message"] == "The model 'b' could not be loaded. The server's log has the reason."
    assert "b can't be loaded: the folder is gone" in caplog.text
    assert states(server) == {"a": "unloaded", "b": "failed"}
    assert server.post("/v1/completions", model="b", prompt="x", **GREEDY)["model"] == "b"
    assert server.http.get("/v1/models/c").status_code == 404
    assert server.http.get("/v1/models/b").json()["state"] == "loaded"
    assert server.http.get(f"/v1/models/{folders['b']}").json()["root"] == "b"


def test_a_model_that_does_not_fit_alone_is_refused(serve: Any, folders: dict[str, str], size: int) -> None:
    server = serve(Loaded(folders).sources(), memory=size // 2).ready()
    for _ in range(2):
        response = server.http.post("/v1/completions", json={"model": "a", "prompt": "x"})
        assert (response.status_code, ". Fix: raise --memory" in response.json()["error"]["message"]) == (503, True)


def test_a_request_waits_for_a_busy_model_within_its_deadline(
    serve: Any, folders: dict[str, str], texts: dict[tuple[str, str], str], size: int
) -> None:
    loaded = Loaded(folders, size)
    server = serve(loaded.sources(), memory=int(1.5 * size), queue_timeout=0.5).ready()
    server.post("/v1/completions", model="a", prompt="x", **GREEDY)
    held = server.state.models[0]
    server.in_loop(lambda: setattr(held, "users", held.users + 1))
    started = time.monotonic()
    late = server.http.post("/v1/completions", json={"model": "b", "prompt": "x"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    assert time.monotonic() - started < 5
    assert server.post("/v1/completions", model="a", prompt=PROMPTS[0], **GREEDY)["choices"][0]["text"]
    assert loaded.loads == ["a"], "the busy model was put away"
    server.in_loop(lambda: server.state._several.release(held))
    asked = {"model": "b", "prompt": PROMPTS[0], **GREEDY}
    server.until(lambda: server.http.post("/v1/completions", json=asked).status_code == 200)
    assert loaded.loads == ["a", "b"], "a load goes on after the request that asked for it has given up"


def test_background_responses_hold_their_model(serve: Any) -> None:
    folders = {"a": "demo", "b": "demo"}
    loaded = Loaded(folders)
    server = serve(loaded.sources(), memory="1GiB").ready()
    asked = {"model": "a", "input": "Hi", "max_output_tokens": 40, "temperature": 0}
    begun = server.post("/v1/responses", background=True, **asked)
    model = server.state.models[0]
    server.until(lambda: server.http.get(f"/v1/responses/{begun['id']}").json()["status"] == "incomplete")
    server.until(lambda: model.users == 0)


@pytest.fixture(scope="module")
def chatty() -> Iterator[LiveServer]:
    """A model that can't be loaded, and the embedded one, which can chat."""
    loaded = Loaded({"a": "./nowhere", "b": "demo"})
    server = LiveServer(loaded.sources(), memory="4GiB").ready()
    yield server
    server.stop()


HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/prefill": {"prompt": "Hi", "wait": True},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [40, 41]},
}


@pytest.mark.parametrize("path", ASKED)
def test_every_body_chooses_its_model(chatty: LiveServer, path: str) -> None:
    answer = chatty.post(path, model="b", **ASKED[path])
    assert answer.get("model", "b") == "b"
    first = chatty.http.post(path, json=ASKED[path])
    assert first.status_code == 503, "the first model, which can't be loaded, should have been asked"
    assert "'a'" in json.dumps(first.json())


def test_every_route_with_a_body_was_asked() -> None:
    assert BODIES.keys() - ASKED.keys() == {"/infill"}  # the embedded model has no marks for it, see below


def test_infill_and_pages_choose_their_model(chatty: LiveServer) -> None:
    hole = {"input_prefix": "a", "input_suffix": "b"}
    assert chatty.http.post("/infill", json={"model": "b", **hole}).status_code == 400
    assert chatty.http.post("/infill", json=hole).status_code == 503
    for path in ("/props", "/tokenizer_info"):
        assert chatty.http.get(path, params={"model": "b"}).status_code == 200
        assert chatty.http.get(path).status_code == 503
        assert chatty.http.get(path, params={"model": "c"}).status_code == 404
    assert chatty.http.get("/props", params={"model": "b"}).json()["model_alias"] == "b"


def test_metrics_have_the_names_of_all_models(serve: Any, folders: dict[str, str]) -> None:
    server = serve(Loaded(folders).sources(), memory="1GiB").ready()
    server.post("/v1/completions", model="b", prompt="x", **GREEDY)
    families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    totals = {each.labels["model_name"]: each.value for each in families["vllm:generation_tokens"].samples if
              each.name.endswith("_total")}  # fmt: skip
    assert totals == {"a": 0, "b": GREEDY["max_tokens"]}
    assert {each.labels["engine"] for each in families["vllm:num_requests_running"].samples} == {"0", "1"}
    ended = [each for each in families["vllm:request_success"].samples if each.value]
    assert {each.labels["model_name"] for each in ended if each.name.endswith("_total")} == {"b"}


def test_a_conversation_goes_on_with_another_model(serve: Any) -> None:
    loaded = Loaded({"a": "demo", "b": "demo"})
    server = serve(loaded.sources(), memory="1GiB").ready()
    few = {"max_output_tokens": 8, "temperature": 0}
    first = server.post("/v1/responses", model="a", input="Hi", **few)
    turn = {"input": "And?", "previous_response_id": first["id"], **few}
    same, other = (server.post("/v1/responses", model=name, **turn) for name in "ab")
    assert [each["output"][0]["content"][0]["text"] for each in (same,)] == [other["output"][0]["content"][0]["text"]]
    assert (other["model"], loaded.loads) == ("b", ["a", "b"])


def test_a_draining_server_refuses_those_who_wait_for_a_model(serve: Any, folders: dict[str, str]) -> None:
    go, loaded = threading.Event(), Loaded(folders)
    loaded.before = lambda name: wait_for(go)
    server = serve(loaded.sources(), memory="1GiB").ready()
    with ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.http.post, "/v1/completions", json={"model": "a", "prompt": "x"})
        server.until(lambda: states(server)["a"] == "loading")
        server.in_loop(lambda: server.server.handle_exit(15, None))
        assert asked.result().json()["error"]["code"] == "shutting_down"
        go.set()
    server.wait()
    assert loaded.loads == ["a"]
    engine = loaded.engines[0]()
    assert engine is None or not engine.is_alive, "the engine that was loaded too late still runs"


def test_a_process_serves_models_by_name(serve_process: Any, folders: dict[str, str]) -> None:
    server: ServerProcess = serve_process(f"one={folders['a']}", folders["b"], "--memory", "1GiB")
    assert "one, b are loaded when a request names them" in server.messages[0]
    for name in ("one", "b", folders["b"]):
        body = {"model": name, "prompt": "x", "max_tokens": 4}
        assert server.http.post("/v1/completions", json=body).json()["model"] == name
    assert any(line.startswith("one: ready; speculation is on") for line in server.messages)
    server.signal()
    assert server.wait() == 0


WRONG = [
    (["=demo"], "is not NAME=MODEL"),
    (["a="], "is not NAME=MODEL"),
    (["a b=demo"], "is not NAME=MODEL"),
    (["demo", "demo"], "two models are called 'demo'"),
    (["a=demo", "a=./nowhere"], "two models are called 'a'"),
    (["demo", "demo=./nowhere"], "two models are called 'demo'"),
    (["demo", "b=demo", "--draft-model", "demo"], "a draft is for one model"),
    (["demo", "b=demo", "--speculative-config", "model=demo"], "a draft is for one model"),
    (["demo", "b=demo", "--chat-template", "x"], "--chat-template is about one model"),
    (["demo", "b=demo", "--served-model-name", "x"], "--served-model-name is about one model"),
    (["demo", "b=demo", "--replicas", "2"], "replicas are of one"),
    (["demo", "b=demo", "--memory", "much"], "memory='much' is not a size"),
    (["demo", "b=./nowhere"], "./nowhere"),
    (["demo", "b=demo", "--memory", "1"], "demo: it takes"),
    (["demo", "b=demo", "--memory", "9MiB", "--kv-memory", "10MiB"], "MiB, and all models may take 9 MiB"),
    (["demo", "--memory", "1GiB"], "memory is for several models"),
    (["a=demo", "--served-model-name", "b"], "--served-model-name"),
]


@pytest.mark.parametrize(("arguments", "problem"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_arguments_are_refused_before_anything_is_loaded(arguments: list[str], problem: str) -> None:
    assert problem in str(error_of("serve", *arguments, "--port", "0"))
    assert isinstance(error_of("serve", *arguments, "--port", "0"), ConfigError | ModelError)


@pytest.mark.parametrize("name", ["TOKENIZER", "REVISION"])
def test_a_variable_about_one_model_is_named(name: str) -> None:
    error = error_of("serve", "demo", "b=demo", "--port", "0", **{f"SPECULANT_{name}": "x"})
    assert error.problem.startswith(f"SPECULANT_{name} is about one model")


@pytest.mark.parametrize("model", [None, "", "third"])
def test_the_environment_s_model_is_none_of_several(monkeypatch: pytest.MonkeyPatch, model: str | None) -> None:
    given = list[dict[str, Any]]()
    monkeypatch.setattr("speculant.cli.serve.run_several", lambda models, values, *others: given.append(values))
    invoke("serve", "a=one", "b=two", SPECULANT_MODEL=model)
    assert len(given) == 1
    assert "model" not in given[0]


def test_one_model_may_have_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = list[Any]()
    monkeypatch.setattr("speculant.cli.serve.run", lambda *values: given.append(values))
    invoke("serve", "small=demo")
    odd = tmp_path / "a=b"
    odd.mkdir()
    invoke("serve", odd)
    (named, unnamed) = [(values["model"], options.served_model_names) for values, options, *_ in given]
    assert (named, unnamed) == (("demo", ("small",)), (str(odd), ()))
