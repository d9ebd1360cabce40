"""The router by prefixes: Ray's, which also forgets the texts that a replica tells it has lost.

Ray's router keeps the texts that each replica was sent, and sends a text to the replicas that had the longest part of
its beginning. It knows nothing of their memory: of two replicas that had a prefix, one may have evicted it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from typing_extensions import override

from speculant.scale.held import GONE

_NAME = "SpeculantPrefixes"


class SentTexts(PrefixTree):  # type: ignore[misc]  # Ray has no types here
    """Ray's tree of texts, by replica."""

    def forget_before(self, tenant: str, time_s: float) -> int:
        """Forget what was sent to a replica before a time, and not since; return how many characters that were."""
        forgotten = 0
        with self.lock:
            node = self.tenant_to_lru_tail.get(tenant)
            while node is not None and node is not self.root and node.tenant_to_last_access_time[tenant] < time_s:
                newer = node.tenant_to_newer_node.get(tenant)
                forgotten += self._remove_tenant_single_node(tenant, node)
                node = newer
        return forgotten


class PrefixRouter(PrefixCacheAffinityRouter):  # type: ignore[misc]
    """See the module's docstring."""

    @override
    def initialize_state(self, **settings: Any) -> None:
        """Share the tree of texts among the routers of a deployment, as Ray's router does."""
        namespace = f"{SERVE_NAMESPACE}::{self._deployment_id.app_name}::{self._deployment_id.name}"
        tree = ray.remote(SentTexts).options(name=_NAME, namespace=namespace, get_if_exists=True, lifetime="detached")
        made = tree.remote()
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        ray.get(controller._register_shutdown_cleanup_actor.remote(made))
        self._told: dict[str, float] = {}  # by replica
        super().initialize_state(tree_actor=made, **settings)

    @override
    def update_replicas(self, replicas: Sequence[Any]) -> None:
        """Forget the texts that replicas have lost; Ray calls this when their statistics change, too."""
        super().update_replicas(replicas)
        before, self._told = self._told, {}
        for replica in replicas:
            name, gone = replica.replica_id.to_full_id_str(), replica.routing_stats.get(GONE, 0.0)
            self._told[name] = gone
            if gone > before.get(name, 0.0):
                self._tree_actor.forget_before.remote(name, gone)
