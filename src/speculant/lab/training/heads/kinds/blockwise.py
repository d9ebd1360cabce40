"""Heads of feed-forward blocks (arXiv 1811.03115) that share the target's output head."""

from __future__ import annotations

import torch

from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.future import FutureObjective
from speculant.lab.training.heads.objective import HeadKind
from speculant.models import Decoder, FeedForwardHeads, FutureShape


def _make(config: HeadTrainingConfig, target: Decoder) -> FutureObjective:
    """Return new heads; their outer weights are zero, so each begins as the target's own prediction."""
    inner = config.inner or 2 * target.hidden_size
    heads = FeedForwardHeads(FutureShape(config.num_heads, target.hidden_size, inner=inner))
    generator = torch.Generator().manual_seed(config.seed)
    torch.nn.init.normal_(heads.up, std=target.hidden_size**-0.5, generator=generator)
    return FutureObjective(heads, target, {"num_heads": config.num_heads, "inner_size": inner})


KIND = HeadKind(_make)
