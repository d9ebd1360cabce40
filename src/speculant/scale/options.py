"""How many replicas there are, how requests are routed to them, and whether Ray is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speculant.errors import ConfigError

ROUTINGS = ("prefix", "load")
_PATHS = ("model", "tokenizer", "weight_cache", "download_dir")  # ends of the names of arguments that are paths
# How fields of `ReplicaOptions` are called where other settings stand beside them.
REPLICA_FIELDS: Mapping[str, str] = {
    "replicas": "replicas",
    "replica_cores": "cores",
    "replica_routing": "routing",
    "replica_imbalance": "imbalance",
    "ray_address": "address",
}


@dataclass(frozen=True)
class ReplicaOptions:
    """The replicas of one model.

    replicas: the fewest and the most; if they differ, the load decides. cores: processor cores of each replica, which
    no other replica of the machine uses; None = the cluster's cores, divided by the most replicas.
    routing: "prefix" = to the replica that had prompts which begin alike, unless it has far more requests than another
    one; "load" = to the one of two random replicas with fewer requests. imbalance: how many requests more are far more.
    address: of the Ray cluster; None = the one of RAY_ADDRESS, or else a new one on this machine.
    """

    replicas: tuple[int, int] = (1, 1)
    cores: int | None = None
    routing: str = "prefix"
    imbalance: int = 8
    address: str | None = None

    def __post_init__(self) -> None:
        low, high = self.replicas
        if not 1 <= low <= high:
            raise ConfigError(f"replicas={low}:{high} is not a range of 1 or more", "use for example 4, or 1:4.")
        if self.cores is not None and self.cores < 1:
            raise ConfigError(f"replica_cores={self.cores} is not above 0", "leave it out, or use 1 or more.")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"replica_routing={self.routing!r} is unknown", f"use {' or '.join(ROUTINGS)}.")
        if self.imbalance < 0:
            raise ConfigError(f"replica_imbalance={self.imbalance} is below 0", "use a number of requests, such as 8.")


def with_absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an engine's arguments with absolute paths in place of those that are here.

    Workers of a cluster have another working folder.
    """
    return {name: _absolute(name, value) for name, value in values.items()}


def _absolute(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return with_absolute_paths(value)
    if name.endswith(_PATHS) and isinstance(value, str) and Path(value).exists():
        return str(Path(value).absolute())
    return value


def replica_range(text: str) -> tuple[int, int]:
    """Read N or LOW:HIGH. Raises ConfigError for anything else."""
    low, colon, high = str(text).partition(":")
    try:
        return int(low), int(high if colon else low)
    except ValueError:
        raise ConfigError(f"replicas {text!r} is not N or LOW:HIGH", "use for example 4, or 1:4.") from None


def check_ray() -> None:
    """Raise ConfigError unless Ray is installed; it is not imported."""
    if find_spec("ray") is None or find_spec("pyarrow") is None:
        raise ConfigError("Ray is not installed", 'pip install -c constraints.txt "speculant[ray]"')
