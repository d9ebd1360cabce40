"""Speculant's engine under `ray.serve.llm`: `LLMConfig(server_cls="speculant.ray:LLMServer", engine_kwargs={...})`.

`ray.serve.llm` takes its models of requests and responses from vLLM or SGLang, one of which must be installed. It keeps
its own routes and routers; this answers as the application of `speculant serve` does.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from speculant.errors import ConfigError
from speculant.serving.inside import InsideRequest, ResponseHead, responses, whole_response
from speculant.serving.options import ServerOptions

_JSON = ((b"content-type", b"application/json"),)
_OWN_OPTIONS = "server_options"  # an entry of engine_kwargs: fields of `ServerOptions`


class LLMServer:
    """A `server_cls` of `ray.serve.llm.LLMConfig`, with the methods that its routes call.

    engine_kwargs: the engine's arguments, see `EngineConfig`; `model` is by default the source in
    model_loading_config. "server_options" in it has fields of `ServerOptions`. Requests and responses are the pydantic
    models of `ray.serve.llm`.
    """

    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        """Load the engine. Raises the errors of `AsyncEngine`."""
        self._config = llm_config
        values = dict(llm_config.engine_kwargs)
        options = ServerOptions(**values.pop(_OWN_OPTIONS, {}))
        loading = llm_config.model_loading_config
        source = getattr(loading, "model_source", None) or llm_config.model_id
        if not isinstance(source, str):
            raise ConfigError("model_source is not a path or an id", "download the model first, and name its folder.")
        values.setdefault("model", source)
        self._app = await asyncio.to_thread(self._load, values, options)

    def _load(self, values: dict[str, Any], options: ServerOptions) -> Any:
        from speculant.engine.async_engine import AsyncEngine
        from speculant.serving.app import make_app
        from speculant.serving.process import settle

        engine = AsyncEngine(**values)
        settle()
        return make_app(engine, options, (self._config.model_id, values["model"]))

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of Ray Serve that the configuration has; a replica has one core if none are named."""
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        options.setdefault("ray_actor_options", {}).setdefault("num_cpus", 1)
        return options

    async def start(self) -> None:
        """Do nothing: the engine runs once the object is made."""

    async def llm_config(self) -> Any:
        """Return the configuration."""
        return self._config

    async def check_health(self) -> None:
        """Raise if the engine is dead."""
        self._app.state.server.check()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a conversation's answer as text, or the whole answer or error as a model."""
        from ray.serve.llm.openai_api_models import ChatCompletionResponse

        async for piece in self._answer("/v1/chat/completions", request, ChatCompletionResponse):
            yield piece

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a completion as text, or the whole completion or error as a model."""
        from ray.serve.llm.openai_api_models import CompletionResponse

        async for piece in self._answer("/v1/completions", request, CompletionResponse):
            yield piece

    async def _answer(self, path: str, request: Any, kind: Any) -> AsyncGenerator[Any, None]:
        body = request.model_dump_json(exclude_unset=True).encode()
        inside = InsideRequest("POST", path, body, _JSON)
        if not request.stream:
            head, content = await whole_response(self._app, inside)
            yield kind(**json.loads(content)) if head.status == 200 else _error(content, head.status)
            return
        async with aclosing(responses(self._app, inside)) as pieces:
            first = await anext(pieces)
            assert isinstance(first, ResponseHead)
            head = first
            failure = b""
            async for piece in pieces:
                assert isinstance(piece, bytes)
                if head.status == 200:
                    yield piece.decode()
                else:
                    failure += piece
            if head.status != 200:
                yield _error(failure, head.status)


def _error(content: bytes, status: int) -> Any:
    """Return an error of the application as the model that `ray.serve.llm` expects."""
    from ray.serve.llm.openai_api_models import ErrorResponse

    error = json.loads(content)["error"]
    return ErrorResponse(error={"message": error["message"], "type": error["type"], "code": status})
