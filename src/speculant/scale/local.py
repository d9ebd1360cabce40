"""Replicas that a process deploys for itself, without Ray's proxies, and ends."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from speculant.errors import ConfigError, ServerError
from speculant.scale.application import NAME, engine_deployment
from speculant.scale.options import ReplicaOptions
from speculant.scale.placing import check_fit
from speculant.serving.options import ServerOptions

_PATIENCE_S = 300.0  # for the replicas to describe themselves: the router starts a process first


class LocalReplicas:
    """Deploys the replicas of one model on a Ray cluster, and starts one on this machine if there is none.

    describe: called once the replicas answer, with the state of speculation, the context and a text about the replicas.
    router, settings: see `application.engine_deployment`.
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
