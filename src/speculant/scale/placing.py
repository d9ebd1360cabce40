"""How many cores an engine gets, and whether engines fit on the machines of a cluster."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import ray

from speculant.errors import ConfigError
from speculant.scale.options import ReplicaOptions

logger = logging.getLogger(__name__)


def cores_of_each(replicas: ReplicaOptions) -> int:
    """Return the cores of each replica: the given number, or as many as all replicas can have.

    Warns if the smallest number of replicas does not fit on the machines that are in the cluster now.
    """
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
