# ruff: noqa: N999 - the method's name
"""Look-ahead embeddings for the target's own pass (arXiv 2311.13581)."""

from __future__ import annotations

from speculant.errors import ConfigError
from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.look_ahead import LookAhead, LookAheadObjective
from speculant.lab.training.heads.objective import HeadKind
from speculant.models import Decoder


def _make(config: HeadTrainingConfig, target: Decoder) -> LookAheadObjective:
    """Return new embeddings, each near the mean of the target's."""
    if config.num_heads >= config.seq:
        raise ConfigError(
            f"texts of {config.seq} tokens have no place for {config.num_heads} predicted ones", "raise --seq."
        )
    return LookAheadObjective(LookAhead(target, config.num_heads, config.seed), target, config.seed)


KIND = HeadKind(_make)
