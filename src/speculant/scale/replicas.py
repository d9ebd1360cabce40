"""The replicas of one model on a Ray cluster: the engine in each, and how they are deployed and ended."""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from speculant.errors import ConfigError, ServerError
from speculant.gguf_file import name_of
from speculant.scale.front import RoutedRequest
from speculant.scale.held import GONE, HeldPrefixes
from speculant.scale.options import Cores, ReplicaOptions, check_fit, cores_of_each, with_absolute_paths
from speculant.serving import ResponseHead, ServerOptions, load_app, responses

logger = logging.getLogger(__name__)
NAME = "speculant"  # of the application
DEPLOYMENT = "EngineReplica"
ONGOING = 4096  # requests of a replica at a time: it has bounds of its own, which answer with an error
_QUEUED = 4096  # requests that wait for a replica in one front
_LOOK_BACK_S = 15.0  # over which the load is averaged; Ray wants more than the 10 s between two readings
_UP_S, _DOWN_S = 5.0, 60.0  # for which the load asks for more replicas, or fewer, before there are
_LONGEST_S = 7 * 86400.0  # of requests without a limit, for which a replica that ends waits
_TOLD_S = 2.0  # between two times at which a replica tells the router which prefixes it has lost
_HEALTH_S = 5.0  # between two checks of a replica's health
_KEPT_TEXT = 4_000_000  # characters that the prefix router keeps
_PATIENCE_S = 300.0  # for the replicas to describe themselves: the router starts a process first


class EngineReplica:
    """Loads an engine and answers requests with it. `answer` first yields the replica's name.

    values: the engine's arguments. names: the model's names for clients. cores: how many it claims.
    """

    def __init__(self, values: Mapping[str, Any], options: ServerOptions, names: tuple[str, ...], cores: int) -> None:
        """Raises the errors of `AsyncEngine`."""
        self._cores = Cores.use_free(cores)
        self.name: str = serve.get_replica_context().replica_id.unique_id
        # The front has these already. A stored response would be found at this replica alone.
        own = replace(options, allowed_origins=(), access_log="none", max_stored_bytes=0)
        self._app = load_app(values, own, names)
        self._engine = self._app.state.server.engine
        self._prefixes = HeldPrefixes()
        logger.info("replica %s is ready; cores: %s", self.name, self.description["cores"])

    @property
    def description(self) -> dict[str, Any]:
        """The state of speculation, the context, and the cores and the process of this replica."""
        engine = self._engine
        return {
            "speculating": engine.speculating,
            "speculation": engine.speculation,
            "context": engine.context,
            "pid": os.getpid(),
            "cores": None if self._cores is None else sorted(self._cores.numbers),
        }

    async def answer(self, routed: RoutedRequest) -> AsyncGenerator[str | ResponseHead | bytes, None]:
        """Yield this replica's name, then the response. Cancelling the call aborts the request."""
        with self._prefixes.used():
            yield self.name
            async with aclosing(responses(self._app, routed.request)) as pieces:
                async for piece in pieces:
                    yield piece

    async def describe(self) -> tuple[str, dict[str, Any]]:
        """Return this replica's name and its `description`."""
        return self.name, self.description

    async def page(self) -> tuple[str, str]:
        """Return this replica's name and its metrics in Prometheus' text format."""
        content, _ = self._app.state.service.metrics_page()
        return self.name, content.decode()

    async def load(self) -> tuple[str, int]:
        """Return this replica's name, and how many sequences run or wait in it."""
        return self.name, self._app.state.server.admission.count

    async def check_health(self) -> None:
        """Raise if the engine is dead; Ray Serve then replaces this replica."""
        self._engine.check_health()

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the time before which the router's texts are not in memory any more, see `PrefixRouter`."""
        return {GONE: self._prefixes.gone_before(self._engine.metrics.evicted_until)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the shares of places and of cache memory in use, for `scaling.wanted_replicas`."""
        totals, places = self._engine.metrics, self._engine.limits.max_num_seqs
        return {
            "places": (totals.running + totals.waiting) / places,
            "tokens": totals.blocks_used / totals.blocks_total if totals.blocks_total else 0.0,
        }

    async def __del__(self) -> None:
        """End the engine once Ray Serve has drained this replica."""
        if (app := getattr(self, "_app", None)) is not None:
            await app.state.server.close()
        if (cores := getattr(self, "_cores", None)) is not None:
            cores.release()


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
        max_ongoing_requests=ONGOING,
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
    return RequestRouterConfig(
        request_router_class=_prefix_router(), request_router_kwargs=settings, request_routing_stats_period_s=_TOLD_S
    )


def _prefix_router() -> type:
    """Return the router by prefixes, which extends Ray's."""
    before = logging.root.handlers[:], logging.root.level
    module = importlib.import_module("speculant.scale.router")
    logging.root.handlers[:], level = before  # the import of Ray's router replaces them
    logging.root.setLevel(level)
    router: type = module.PrefixRouter
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
        "policy": AutoscalingPolicy(policy_function="speculant.scale.options:wanted_replicas"),
    }
    return {"autoscaling_config": AutoscalingConfig(**{**scaling, **settings})}


class LocalReplicas:
    """Deploys the replicas of one model on a Ray cluster, and starts one on this machine if there is none.

    describe: called once the replicas answer, with the state of speculation, the context and a text about the replicas.
    router, settings: see `engine_deployment`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        options: ServerOptions,
        replicas: ReplicaOptions,
        describe: Callable[..., None] = lambda *_: None,
        router: str | type | None = None,
        **settings: Any,
    ) -> None:
        self._values, self._options, self._replicas, self._describe = values, options, replicas, describe
        self._router, self._settings, self._is_own = router, settings, False
        self._name = f"{NAME}-{uuid.uuid4().hex[:8]}"  # other servers of the cluster have theirs

    def connect(self) -> None:
        """Connect to a Ray cluster, or start one on this machine."""
        self._is_own = connect(self._replicas)

    def start(self) -> Any:
        """Deploy, and return the handle once all replicas answer. Raises ConfigError if they can't start."""
        with starting():
            serve.start(proxy_location="Disabled")
        application = engine_deployment(self._values, self._options, self._replicas, self._router, **self._settings)
        try:
            handle = serve.run(application, name=self._name, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"the replicas did not start: {_reason(self._name)}", "see the reason above.") from error
        with starting():
            found = handle.broadcast("describe").results(timeout_s=_PATIENCE_S)
        first = found[0][1]
        cores = ", ".join(f"{name}: cores {each['cores']}" for name, each in sorted(found))
        self._describe(
            first["speculating"], first["speculation"], first["context"], f" on {len(found)} replicas ({cores})"
        )
        return handle

    def stop(self) -> None:
        """End the replicas. A cluster that was started here ends with this process."""
        if not ray.is_initialized():
            return
        if self._is_own:
            serve.shutdown()
        else:
            serve.delete(self._name)


def connect(replicas: ReplicaOptions) -> bool:
    """Connect to the Ray cluster of an address or of RAY_ADDRESS. Without any, start one here, and return True.

    A cluster that is started here sends no usage statistics. Raises ConfigError if the replicas do not fit on this
    machine, or if there is no cluster at the address.
    """
    address = replicas.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        check_fit(replicas, os.cpu_count() or 1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 would let every other process go before an engine
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local = {} if address else {"include_dashboard": False}
    try:
        with starting():
            ray.init(
                address=address or "local",
                log_to_driver=False,
                configure_logging=False,
                ignore_reinit_error=True,
                **local,
            )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}", "correct --ray-address.") from error
    return not address


@contextmanager
def starting() -> Iterator[None]:
    """Raise ServerError if Ray, or a part of it, does not start in time. Other errors pass."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, TimeoutError) or type(error) in (Exception, RuntimeError)):  # Ray's own have no class
            raise
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ServerError(
            f"Ray did not start: {reason}",
            "see whether this machine has processors and memory to spare, end other Ray processes with `ray stop`, and "
            "give the same command again.",
        ) from error


def _reason(name: str) -> str:
    """Return why the deployment failed, as Ray Serve tells it."""
    status = serve.status().applications.get(name)
    found = [each.message for each in status.deployments.values()] if status is not None else []
    return " ".join(filter(None, found)) or "Ray Serve gives no reason"
