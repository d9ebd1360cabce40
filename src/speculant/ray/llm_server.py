"""Speculant's engine under `ray.serve.llm`: `LLMConfig(server_cls="speculant.ray:LLMServer", engine_kwargs={...})`.

`ray.serve.llm` takes its models of requests and responses from vLLM or SGLang, one of which must be installed. It keeps
its own routes and routers; this answers as the application of `speculant serve` does.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from speculant.errors import ConfigError
from speculant.serving.options import ServerOptions
from speculant.serving.process import InsideRequest, ResponseHead, load_app, responses, whole_response

_JSON = ((b"content-type", b"application/json"),)
# The public module has no models of tokens.
_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
_KEPT = ("authorization", "x-request-id", "traceparent")
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
        names = (llm_config.model_id, values["model"])
        self._app = await asyncio.to_thread(load_app, values, options, names)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:
        """Return the options of Ray Serve that the configuration has; a replica has one core if none are named.

        Raises ConfigError for a placement group or LoRA adapters: an engine is one process, with one set of weights.
        """
        for name in ("placement_group_config", "lora_config"):
            if getattr(llm_config, name, None):
                raise ConfigError(f"{name} is given, which speculant.ray:LLMServer does not support", "leave it out.")
        options: dict[str, Any] = copy.deepcopy(llm_config.deployment_config)
        actor = options.setdefault("ray_actor_options", {})
        actor.setdefault("num_cpus", 1)
        if environment := getattr(llm_config, "runtime_env", None):
            actor["runtime_env"] = {**actor.get("runtime_env", {}), **environment}
        if accelerator := getattr(llm_config, "accelerator_type", None):
            actor.setdefault("accelerator_type", accelerator)
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
        async for piece in self._answer("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse"):
            yield piece

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the events of a completion as text, or the whole completion or error as a model."""
        async for piece in self._answer("/v1/completions", request, raw_request_info, "CompletionResponse"):
            yield piece

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the tokens of a text, or an error, as a model."""
        async for piece in self._answer("/tokenize", request, raw_request_info, "TokenizeResponse"):
            yield piece

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Yield the text of tokens, or an error, as a model."""
        async for piece in self._answer("/detokenize", request, raw_request_info, "DetokenizeResponse"):
            yield piece

    async def _answer(self, path: str, request: Any, raw: Any, kind: str) -> AsyncGenerator[Any, None]:
        """Yield the application's response. raw: has the client's headers. kind: the name of the response's model."""
        body = request.model_dump_json(exclude_unset=True).encode()
        inside = InsideRequest("POST", path, body, (*_JSON, *_kept(raw)))
        if not getattr(request, "stream", False):
            head, content = await whole_response(self._app, inside)
            yield _model(kind, **json.loads(content)) if head.status == 200 else _error(content, head.status)
            return
        async with aclosing(responses(self._app, inside)) as pieces:
            status, refused = 0, bytearray()
            async for piece in pieces:
                if isinstance(piece, ResponseHead):
                    status = piece.status
                elif status == 200:
                    yield piece.decode()
                else:
                    refused += piece
            if status != 200:
                yield _error(bytes(refused), status)


def _kept(raw: Any) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of a client that the application reads: its key, and the request's id."""
    given = {} if raw is None else {name.lower(): value for name, value in raw.headers.items()}
    return tuple((name.encode(), given[name].encode("latin-1")) for name in _KEPT if name in given)


def _error(content: bytes, status: int) -> Any:
    """Return an error of the application as the model that `ray.serve.llm` expects."""
    error = json.loads(content)["error"]
    named = {name: error.get(name) for name in ("message", "type", "param")}
    return _model("ErrorResponse", error={**named, "code": status})


def _model(kind: str, **values: Any) -> Any:
    """Return a response as Ray's routes know it."""
    return getattr(importlib.import_module(_MODELS), kind)(**values)
