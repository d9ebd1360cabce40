"""One engine of a cluster, behind the application of `speculant serve`, in a replica of Ray Serve."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve

from speculant.ray.cores import Cores
from speculant.ray.routed import RoutedRequest
from speculant.serving.options import ServerOptions
from speculant.serving.process import ResponseHead, load_app, responses

logger = logging.getLogger(__name__)


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
        yield self.name
        async with aclosing(responses(self._app, routed.request)) as pieces:
            async for piece in pieces:
                yield piece

    async def describe(self) -> tuple[str, dict[str, Any]]:
        """Return this replica's name and its `description`."""
        return self.name, self.description

    async def page(self) -> tuple[str, str]:
        """Return this replica's name and its metrics in Prometheus' text format."""
        content, _ = self._app.state.service.metrics.page()
        return self.name, content.decode()

    async def load(self) -> tuple[str, int]:
        """Return this replica's name, and how many sequences run or wait in it."""
        return self.name, self._app.state.server.admission.count

    async def check_health(self) -> None:
        """Raise if the engine is dead; Ray Serve then replaces this replica."""
        self._engine.check_health()

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
