"""What a Ray that does not start leads to."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray import serve

from speculant.errors import ConfigError, ServerError
from speculant.scale import LocalReplicas, ReplicaOptions, connect
from speculant.serving import ServerOptions

LATE = Exception("The current node timed out during startup. This could happen because\nthe GCS is overloaded.")


def raising(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize("error", [LATE, RuntimeError("no GCS"), TimeoutError(), TimeoutError("Timed out")], ids=repr)
@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_cluster_that_is_late_is_an_error_with_its_fix(
    monkeypatch: pytest.MonkeyPatch, error: Exception, address: str | None
) -> None:
    monkeypatch.setattr(ray, "init", raising(error))
    with pytest.raises(ServerError, match="Ray did not start: (The current node|no GCS|Timed? ?out).*\n.*ray stop"):
        connect(ReplicaOptions(address=address))


@pytest.mark.parametrize("error", [ConnectionError("none"), ValueError("no address")], ids=repr)
def test_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(ray, "init", raising(error))
    with pytest.raises(ConfigError, match="no Ray cluster at 10.0.0.1:6379"):
        connect(ReplicaOptions(address="10.0.0.1:6379"))


def test_a_ray_serve_that_is_late_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "start", raising(TimeoutError("HTTP proxies not available after 60s.")))
    with pytest.raises(ServerError, match="did not start: HTTP proxies"):
        LocalReplicas({"model": "demo"}, ServerOptions(), ReplicaOptions()).start()
