"""Two Ray nodes on this machine, and a server in front of replicas on them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from speculant.scale import LocalReplicas, ReplicaOptions, make_front
from speculant.serving import ServerOptions
from tests.servers import LiveServer

PATIENCE = 300.0  # seconds for processes of Ray to start on a busy machine
PAIR = {"model": "demo", "draft_model": "demo", "max_num_seqs": 8}
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        node = {"num_cpus": 2, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        made.add_node(num_cpus=2)
        yield made.address
        serve.shutdown()
        ray.shutdown()
        made.shutdown()


class ReplicaServer(LiveServer):
    """A server in front of replicas, which it deploys."""

    def __init__(
        self,
        address: str,
        replicas: tuple[int, int],
        values: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        routing: str = "prefix",
        **options: Any,
    ) -> None:
        chosen = ReplicaOptions(replicas, cores=1, address=address, routing=routing)
        self.found: list[Any] = []
        serving = ServerOptions(port=0, **options)
        local = LocalReplicas(values or PAIR, serving, chosen, lambda *all: self.found.append(all), **(settings or {}))
        self._serve(make_front(local, serving), options)

    def ready(self) -> ReplicaServer:
        """Wait until the replicas answer."""
        self.until(lambda: self.http.get("/health").status_code == 200, PATIENCE)
        return self

    def ask(self, method: str) -> dict[str, Any]:
        """Return what a method of all replicas returns, by their names."""
        assert self.server._loop is not None
        asked = asyncio.run_coroutine_threadsafe(self.state.fleet.ask(method), self.server._loop)
        return asked.result(60)

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that answer."""
        return sorted(self.ask("load"))

    def stop(self) -> None:
        """End the server and its replicas."""
        self.http.close()
        self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def kill(pid: int) -> None:
    """End a process of this machine at once."""
    os.kill(pid, 9)
