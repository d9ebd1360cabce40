"""How many replicas there are, how many cores each has, how requests are routed to them, and whether Ray is installed.

Each replica claims cores of its own: replicas that share cores are slower than one alone.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from speculant.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


ROUTINGS = ("prefix", "load")
_PATHS = (
    "model",
    "tokenizer",
    "weight_cache",
    "download_dir",
    "generation_config",
)  # ends of the names of arguments that are paths
_MADE = ("prompt_cache", "learn")  # names of arguments that are folders, which are made if they are missing
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
    if isinstance(value, str) and (name in _MADE or (name.endswith(_PATHS) and Path(value).exists())):
        return str(Path(value).expanduser().absolute())
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


logger = logging.getLogger(__name__)
FULL = 0.75  # share of places, or of cache memory, that a replica should have in use


def cores_of_each(replicas: ReplicaOptions) -> int:
    """Return the cores of each replica: the given number, or as many as all replicas can have.

    Warns if the smallest number of replicas does not fit on the machines that are in the cluster now.
    """
    import ray

    machines = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    cores = replicas.cores or equal_share(machines, replicas.replicas[1])
    if (problem := _misfit(machines, cores, replicas)) is not None:
        logger.warning("%s: they wait until there are more machines", problem)
    return cores


def check_fit(replicas: ReplicaOptions, machine: int) -> None:
    """Raise ConfigError if the smallest number of replicas does not fit on one machine. machine: its cores."""
    cores = replicas.cores or equal_share([machine], replicas.replicas[1])
    if (problem := _misfit([machine], cores, replicas)) is not None:
        raise ConfigError(problem, "lower --replicas or --replica-cores.")


def _misfit(machines: Sequence[int], cores: int, replicas: ReplicaOptions) -> str | None:
    low = replicas.replicas[0]
    if fitting(machines, cores) >= low:
        return None
    return f"{low} replicas with {cores} cores each do not fit on machines with {', '.join(map(str, machines))} cores"


def equal_share(machines: Sequence[int], count: int) -> int:
    """Return the most cores that each of `count` replicas can have; at least 1. machines: the cores of each machine."""
    return next((cores for cores in range(max(machines, default=1), 1, -1) if fitting(machines, cores) >= count), 1)


def fitting(machines: Sequence[int], cores: int) -> int:
    """Return how many replicas fit. machines: the cores of each machine. cores: of a replica."""
    return sum(machine // cores for machine in machines)


class Cores:
    """Cores that this process alone uses, among all processes that claim theirs here.

    A lock on a file stands for each core. The system releases it when the process ends, however it ends.
    """

    def __init__(self, numbers: frozenset[int], locks: tuple[IO[str], ...]) -> None:
        self.numbers, self._locks = numbers, locks

    @classmethod
    def claim(cls, count: int, folder: Path | None = None) -> Cores | None:
        """Return `count` free cores; None if fewer are free, or if this system knows no sets of cores."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        folder = folder or Path(tempfile.gettempdir()) / f"speculant-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            logger.warning("%s belongs to others: this replica shares cores with others", folder)
            return None
        taken: dict[int, IO[str]] = {}
        for core in sorted(os.sched_getaffinity(0)):
            if len(taken) == count:
                break
            if (lock := _locked(folder / f"core-{core}")) is not None:
                taken[core] = lock
        if len(taken) < count:
            for lock in taken.values():
                lock.close()
            logger.warning("only %s of %s cores are free: this replica shares cores with others", len(taken), count)
            return None
        return cls(frozenset(taken), tuple(taken.values()))

    @classmethod
    def use_free(cls, count: int) -> Cores | None:
        """Claim `count` cores and use them; return None, and leave all cores to the process, if fewer are free."""
        cores = cls.claim(count)
        if cores is not None:
            cores.use()
        return cores

    def use(self) -> None:
        """Bind this process to the cores; threads that are made later inherit that."""
        os.sched_setaffinity(0, self.numbers)

    def release(self) -> None:
        """Let others claim the cores."""
        for lock in self._locks:
            lock.close()


def _locked(path: Path) -> IO[str] | None:
    file = os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the load needs, before bounds and delays, which Ray Serve applies."""
    metrics = context.aggregated_metrics or {}
    return needed([metrics.get("places", {}), metrics.get("tokens", {})], context.current_num_replicas), {}


def needed(shares: list[Mapping[Any, float]], current: int) -> int:
    """Return the replicas that bring the larger of these loads to `FULL`.

    shares: by replica, the share of its places in use or waited for, and the share of its memory in use. Without any
    figure the number stays.
    """
    sums = [sum(by_replica.values()) for by_replica in shares if by_replica]
    if not sums:
        return current
    return max(1, math.ceil(max(sums) / FULL - 1e-9))
