"""The flags of commands that can use several engines on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from speculant.cli.flags import FlagGroup
from speculant.errors import ConfigError
from speculant.scale import REPLICA_FIELDS, ReplicaOptions, replica_range


class ReplicaFlags(FlagGroup):
    """Several engines on a Ray cluster."""

    sets = ReplicaOptions

    replicas: Annotated[str, "N engines on a Ray cluster (extra ray), or LOW:HIGH of them, as many as the load needs."]
    cores: Annotated[int, "Cores that each replica has for itself [default: an equal share of all]."]
    routing: Annotated[str, "Which replica answers: prefix (has seen a prompt that begins alike) or load."]
    imbalance: Annotated[int, "Requests that a replica may have more than another for the sake of a prefix."]
    address: Annotated[str, "The Ray cluster [env: RAY_ADDRESS; default: a new one on this machine]."]

    renamed: ClassVar[Mapping[str, str]] = {field: name for name, field in REPLICA_FIELDS.items()}

    def options(self) -> ReplicaOptions | None:
        """Return the replicas' options; None = one engine in this process, without Ray."""
        if not self.given:
            return None
        if "replicas" not in self.given:
            raise ConfigError("options of replicas are given, and no number of them", "add --replicas N.")
        return ReplicaOptions(**{**self.given, "replicas": replica_range(self.given["replicas"])})
