"""Requests of every kind leave no objects behind. `make soak-server` looks at the memory of a process, for an hour."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import Any

import pytest

from speculant import AsyncEngine
from tests.async_engines import assert_nothing_is_held, core
from tests.servers import LiveServer, serve
from tests.soak_server import Client

__all__ = ["serve"]
ROUNDS = 2, 8  # how often each kind is sent; the first round fills what is kept


def kept_objects() -> Counter[str]:
    """Count the objects of each class, those of the language left out, once garbage is collected."""
    gc.collect()
    kinds = Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter({name: count for name, count in kinds.items() if not name.startswith("builtins.")})


@pytest.mark.slow
def test_requests_leave_no_objects_behind(serve: Any) -> None:
    """No class has as many new objects as there were requests of a kind. Fewer are what the engine learns of costs."""
    engine = AsyncEngine("demo", draft_model="demo", max_num_seqs=4, enable_prefix_caching=False)
    server: LiveServer = serve(engine, api_keys=("first",), response_ttl=0.01).ready()
    rounds = list[Counter[str]]()
    for times in ROUNDS:
        client = Client(server.url, "first", 1, Counter(), threading.Event(), {})
        for kind in client.kinds * times:
            kind()
        client.close()
        server.until(lambda: not core(engine).has_unfinished() and not server.server.server_state.connections)
        assert_nothing_is_held(core(engine))
        rounds.append(kept_objects())
    new = rounds[1] - rounds[0]
    assert {name: count for name, count in new.items() if count >= ROUNDS[1]} == {}
