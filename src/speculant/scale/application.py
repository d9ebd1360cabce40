"""Ray Serve's application: `app` for `serve run`, and what `speculant serve --replicas` deploys."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speculant.config import EngineConfig
from speculant.gguf_file import name_of
from speculant.scale.arguments import read_arguments
from speculant.scale.front import make_front
from speculant.scale.options import ReplicaOptions, with_absolute_paths
from speculant.scale.placing import cores_of_each
from speculant.scale.replica import EngineReplica
from speculant.serving.options import ServerOptions

logger = logging.getLogger(__name__)

NAME = "speculant"  # of the application
DEPLOYMENT = "EngineReplica"
_ONGOING = 4096  # requests of a replica at a time: it has bounds of its own, which answer with an error
_QUEUED = 4096  # requests that wait for a replica in one front
_LOOK_BACK_S = 15.0  # over which the load is averaged; Ray wants more than the 10 s between two readings
_UP_S, _DOWN_S = 5.0, 60.0  # for which the load asks for more replicas, or fewer, before there are
_LONGEST_S = 7 * 86400.0  # of requests without a limit, for which a replica that ends waits
_HEALTH_S = 5.0  # between two checks of a replica's health
_KEPT_TEXT = 4_000_000  # characters that the prefix router keeps


def engine_deployment(
    values: Mapping[str, Any],
    options: ServerOptions,
    replicas: ReplicaOptions,
    router: str | type | None = None,
    **settings: Any,
) -> Application:
    """Return the replicas as an application of Ray Serve, to which calls of `answer` go by the router.

    values: the engine's arguments. router: a class of Ray Serve in place of that of `replicas.routing`. settings:
    further ones of Ray's autoscaler, such as downscale_delay_s.
    """
    model = str(values["model"])
    short = name_of(model)
    cores = cores_of_each(replicas)
    deployment = serve.deployment(EngineReplica).options(
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": cores},
        max_ongoing_requests=_ONGOING,
        max_queued_requests=_QUEUED,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=options.request_timeout or _LONGEST_S,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=_router(replicas, router),
        **_scale(replicas, settings),
    )
    weights = options.client_weights
    own = replace(options, client_weights=None if weights is None else str(Path(weights).absolute()))
    return deployment.bind(with_absolute_paths(values), own, (short, model), cores)


def _router(replicas: ReplicaOptions, router: str | type | None) -> RequestRouterConfig:
    if router is not None:
        return RequestRouterConfig(request_router_class=router)
    if replicas.routing == "load":
        return RequestRouterConfig()
    settings = {
        "imbalanced_threshold": replicas.imbalance,
        "do_eviction": True,
        "eviction_threshold_chars": _KEPT_TEXT,
        "eviction_target_chars": _KEPT_TEXT * 9 // 10,
    }
    return RequestRouterConfig(request_router_class=_prefix_router(), request_router_kwargs=settings)


def _prefix_router() -> type:
    """Return Ray's router by prefixes. `ray.serve.llm`, which exports it, needs vLLM."""
    before = logging.root.handlers[:], logging.root.level
    module = importlib.import_module("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router")
    logging.root.handlers[:], level = before  # the import replaces them
    logging.root.setLevel(level)
    router: type = module.PrefixCacheAffinityRouter
    return router


def _scale(replicas: ReplicaOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    low, high = replicas.replicas
    if low == high:
        return {"num_replicas": low}
    scaling = {
        "min_replicas": low,
        "max_replicas": high,
        "look_back_period_s": _LOOK_BACK_S,
        "upscale_delay_s": _UP_S,
        "downscale_delay_s": _DOWN_S,
        "policy": AutoscalingPolicy(policy_function="speculant.scale.scaling:wanted_replicas"),
    }
    return {"autoscaling_config": AutoscalingConfig(**{**scaling, **settings})}


class _Deployed:
    """Replicas that Ray Serve deploys, and ends, together with their front."""

    def __init__(self, application: str) -> None:
        self._application = application

    def connect(self) -> None:
        """See `front.Replicas`."""

    def start(self) -> Any:
        """See `front.Replicas`."""
        return serve.get_deployment_handle(DEPLOYMENT, self._application)

    def stop(self) -> None:
        """See `front.Replicas`."""


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


def _behind_proxies(options: ServerOptions) -> FastAPI:
    """Return the front of replicas that Ray's proxies call."""
    application = serve.get_replica_context().app_name
    front = make_front(_Deployed(application), replace(options, host="0.0.0.0"))  # Ray's proxies listen, not the front
    front.add_middleware(_WithoutId)
    return front


def app(args: Mapping[str, Any]) -> Application:
    """Build the application: `serve run speculant.ray:app model=MODEL draft_model=DRAFT replicas=1:4`.

    args: see `arguments.read_arguments`, with its errors.
    """
    values, options, replicas = read_arguments(args)
    EngineConfig.from_arguments(**values)  # raises for values that do not fit together

    def behind_proxies() -> Any:  # Ray Serve takes a function for one that builds, and nothing else that can be called
        return _behind_proxies(options)

    front = serve.deployment(serve.ingress(behind_proxies)())
    front = front.options(name="Front", max_ongoing_requests=_ONGOING, ray_actor_options={"num_cpus": 0})
    return front.bind(engine_deployment(values, options, replicas))
