"""Heads of residual blocks (arXiv 2401.10774) that share the target's output head."""

from __future__ import annotations

from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.future import FutureObjective
from speculant.lab.training.heads.objective import HeadKind
from speculant.models import Decoder, FutureShape, ResidualHeads


def _make(config: HeadTrainingConfig, target: Decoder) -> FutureObjective:
    """Return new heads; their weights are zero, so each begins as the target's own prediction."""
    heads = ResidualHeads(FutureShape(config.num_heads, target.hidden_size, config.num_layers))
    names = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
    return FutureObjective(heads, target, names)


KIND = HeadKind(_make)
