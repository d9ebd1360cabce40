"""The application of `serve run speculant.ray:app`, behind Ray's own proxies.

Its arguments are text, or values of a YAML file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from speculant.config import EngineConfig
from speculant.errors import ConfigError, suggest
from speculant.scale.front import Replicas, make_front
from speculant.scale.options import REPLICA_FIELDS, ReplicaOptions, replica_range
from speculant.scale.replicas import DEPLOYMENT, ONGOING, engine_deployment
from speculant.serving import ServerOptions

# What Ray's proxies do in place of our server, or what Ray's own commands set.
PROXIES = frozenset(
    {
        *("host", "port", "header_timeout", "max_connections", "max_connections_per_address", "trusted_proxies"),
        *("drain_timeout", "access_log", "ray_address"),
    }
)


def read_arguments(args: Mapping[str, Any]) -> tuple[dict[str, Any], ServerOptions, ReplicaOptions]:
    """Return the engine's arguments, the server's options and those of the replicas.

    The engine's arguments may also be in the environment as SPECULANT_<NAME>, and an API key as SPECULANT_API_KEY.
    Raises ConfigError for an unknown name, one that has no effect behind Ray's proxies, a value of a wrong type, or a
    missing model.
    """
    engine, server = ({field.name for field in fields(kind)} for kind in (EngineConfig, ServerOptions))
    given = {name: value for name in engine if (value := os.environ.get(f"SPECULANT_{name.upper()}"))} | dict(args)
    known = {*engine, *server, *REPLICA_FIELDS}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"{unknown[0]!r} is no argument", suggest(unknown[0], sorted(known)))
    if useless := sorted(set(given) & PROXIES):
        raise ConfigError(f"{useless[0]!r} has no effect behind Ray's proxies", "leave it out, and set up the proxies.")
    values = {name: _typed(EngineConfig, name, given[name]) for name in sorted(engine & set(given))}
    if "model" not in values:
        raise ConfigError("no model is given", "serve run speculant.ray:app model=PATH_OR_ID")
    options = {name: _typed(ServerOptions, name, given[name]) for name in sorted(server & set(given))}
    if "api_keys" not in options and (key := os.environ.get("SPECULANT_API_KEY")):
        options["api_keys"] = (key,)
    replicas: dict[str, Any] = {
        field: replica_range(given[name]) if field == "replicas" else _typed(ReplicaOptions, field, given[name])
        for name, field in REPLICA_FIELDS.items()
        if name in given
    }
    return values, ServerOptions(**options), ReplicaOptions(**replicas)


def _typed(kind: type, name: str, value: Any) -> Any:
    """Return a field's value; text may be JSON. Raises ConfigError for a value of another type."""
    wanted = TypeAdapter(get_type_hints(kind)[name])
    candidates = [value]
    if isinstance(value, str):
        with suppress(ValueError):
            candidates.append(json.loads(value))
        low, colon, high = value.partition(":")
        candidates += [value.split(","), *([[low, high]] if colon else [])]
    for each in candidates:
        try:
            return wanted.validate_python(each)
        except ValidationError:
            continue
    shown = name if name == "api_keys" else f"{name}={value!r}"
    raise ConfigError(f"{shown} has the wrong type", f"give {wanted.json_schema().get('type', 'JSON')}.")


class _Deployed(Replicas):
    """Replicas that Ray Serve deploys, and ends, together with their front."""

    @override
    def connect(self) -> None:
        pass

    @override
    def start(self) -> Any:
        return serve.get_deployment_handle(DEPLOYMENT, serve.get_replica_context().app_name)

    @override
    def stop(self) -> None:
        pass


class _WithoutId:
    """Leaves X-Request-Id out of responses: Ray's proxy adds it, with the same value."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection, see ASGI."""

        async def send_without(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_without)


def app(args: Mapping[str, Any]) -> Application:
    """Build the application: `serve run speculant.ray:app model=MODEL draft_model=DRAFT replicas=1:4`.

    args: see `read_arguments`, with its errors.
    """
    values, options, replicas = read_arguments(args)
    EngineConfig.from_arguments(**values)  # raises for values that do not fit together

    def behind_proxies() -> Any:  # Ray Serve takes a function for one that builds, and nothing else that can be called
        front = make_front(_Deployed(), replace(options, host="0.0.0.0"))  # Ray's proxies listen, not the front
        front.add_middleware(_WithoutId)
        return front

    front = serve.deployment(serve.ingress(behind_proxies)())
    front = front.options(name="Front", max_ongoing_requests=ONGOING, ray_actor_options={"num_cpus": 0})
    return front.bind(engine_deployment(values, options, replicas))
