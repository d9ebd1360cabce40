"""The `server_cls` of `ray.serve.llm`, with stand-ins for its models, which need vLLM.

`tests/clients/ray_llm.py` runs it with the real ones.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Coroutine, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel, ConfigDict

from speculant.errors import ConfigError
from speculant.ray.llm_server import LLMServer
from speculant.serving.errors import ApiError
from speculant.serving.process import InsideRequest, whole_response

T = TypeVar("T")
PROMPT = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
NAMES = ("ChatCompletionResponse", "CompletionResponse", "TokenizeResponse", "DetokenizeResponse", "ErrorResponse")


class Model(BaseModel):
    """A request or response with any fields."""

    model_config = ConfigDict(extra="allow")


class Served:
    """A server in an event loop."""

    def __init__(self, **settings: Any) -> None:
        self.runner = asyncio.Runner()
        loading = SimpleNamespace(model_source=None)
        config = SimpleNamespace(model_id="demo", model_loading_config=loading, engine_kwargs=settings)
        self.server = LLMServer.__new__(LLMServer)
        self.run(LLMServer.__init__(self.server, config))  # Ray Serve awaits it, too
        self.app = self.server._app

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns."""
        return self.runner.run(work)

    def answer(self, method: str, headers: dict[str, str] | None = None, **body: Any) -> list[Any]:
        """Return what a method yields."""
        raw = None if headers is None else SimpleNamespace(headers=headers)

        async def read() -> list[Any]:
            pieces: AsyncGenerator[Any, None] = getattr(self.server, method)(Model(**body), raw)
            return [piece async for piece in pieces]

        return self.run(read())

    def alone(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer of the application itself."""
        headers = ((b"content-type", b"application/json"),)
        request = InsideRequest("POST", path, json.dumps(body).encode(), headers)
        return json.loads(self.run(whole_response(self.app, request))[1])

    def close(self) -> None:
        """End the engine."""
        self.run(self.app.state.server.close())
        self.runner.close()


@pytest.fixture(scope="module")
def models() -> Iterator[None]:
    """Put stand-ins in the place of `ray.serve.llm`."""
    module = ModuleType("ray.llm._internal.serve.core.configs.openai_api_models")
    for name in NAMES:
        setattr(module, name, type(name, (Model,), {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield


@pytest.fixture(scope="module")
def served(models: None) -> Iterator[Served]:
    """Return a server of the embedded pair that needs a key if one is given."""
    made = Served(draft_model="demo", max_num_seqs=4, max_model_len=256)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "kind"),
    [
        ("chat", "/v1/chat/completions", CHAT, "ChatCompletionResponse"),
        ("completions", "/v1/completions", PROMPT, "CompletionResponse"),
        ("tokenize", "/tokenize", {"prompt": "def add"}, "TokenizeResponse"),
        ("detokenize", "/detokenize", {"tokens": [5, 6]}, "DetokenizeResponse"),
    ],
)
def test_whole_answers_are_models(served: Served, method: str, path: str, body: dict[str, Any], kind: str) -> None:
    (answer,) = served.answer(method, **body)
    assert type(answer).__name__ == kind
    changing = {"id", "created"}
    assert {key: value for key, value in answer.model_dump().items() if key not in changing} == {
        key: value for key, value in served.alone(path, body).items() if key not in changing
    }


def test_streams_are_events(served: Served) -> None:
    events = served.answer("completions", **PROMPT, stream=True)
    assert all(isinstance(event, str) for event in events)
    *chunks, last = "".join(events).removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    text = "".join(json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks)
    assert text == served.alone("/v1/completions", PROMPT)["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_models(served: Served, stream: bool) -> None:
    (error,) = served.answer("completions", **PROMPT | {"temperature": -1, "stream": stream})
    assert type(error).__name__ == "ErrorResponse"
    assert (error.error["code"], error.error["param"]) == (400, "temperature")
    assert error.error["message"]


def test_keys_of_clients_are_passed_on(models: None) -> None:
    keyed = Served(draft_model="demo", max_num_seqs=2, max_model_len=64, server_options={"api_keys": ("sk-1",)})
    try:
        (refused,) = keyed.answer("tokenize", prompt="def")
        assert refused.error["code"] == 401
        (answer,) = keyed.answer("tokenize", {"Authorization": "Bearer sk-1", "Host": "x"}, prompt="def")
        assert answer.count >= 1
        keyed.run(keyed.server.check_health())
    finally:
        keyed.close()
    with pytest.raises(ApiError):
        asyncio.run(keyed.server.check_health())


def _config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"deployment_config": {}, "runtime_env": None, "accelerator_type": None, **values})


def test_deployment_options_are_those_of_the_configuration() -> None:
    given = {"num_replicas": 2, "ray_actor_options": {"runtime_env": {"env_vars": {"A": "1"}}}}
    config = _config(deployment_config=given, runtime_env={"pip": ["x"]}, accelerator_type="L4")
    assert LLMServer.get_deployment_options(config) == {
        "num_replicas": 2,
        "ray_actor_options": {
            "num_cpus": 1,
            "runtime_env": {"env_vars": {"A": "1"}, "pip": ["x"]},
            "accelerator_type": "L4",
        },
    }
    assert "num_cpus" not in given["ray_actor_options"], "the configuration was changed"  # type: ignore[operator]


@pytest.mark.parametrize("name", ["placement_group_config", "lora_config"])
def test_unsupported_settings_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        LLMServer.get_deployment_options(_config(**{name: {"x": 1}}))
