"""How many replicas the load needs, and how many cores each has.

Each claims cores of its own: replicas that share cores are slower than one alone.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from speculant.errors import ConfigError
from speculant.scale.options import ReplicaOptions

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

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
    """Return how many replicas fit. machines: the cores of each machine. cores: those of a replica."""
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
