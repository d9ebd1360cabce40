"""A decoder layer over embeddings and hidden states (arXiv 2401.15077); see lab/training/heads/rounds.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.heads.objective import HeadKind
from speculant.lab.training.heads.rounds import RoundsObjective, begin_small, layer_sizes
from speculant.models import Decoder, HeadConfig, HeadDecoder, StateEntry

REGRESSION = 0.5  # weight of the distance of states; it falls to zero at the end of a run


class EagleObjective(RoundsObjective):
    """Rounds whose states are also trained to be near the target's."""

    @override
    def _each_depth(self, made: Tensor, own: Tensor, progress: float) -> Tensor:
        apart = functional.smooth_l1_loss(made, own.expand_as(made), reduction="none").mean((1, 2))
        return super()._each_depth(made, own, progress) + REGRESSION * (1 - progress) * apart


def _make(config: HeadTrainingConfig, target: Decoder) -> EagleObjective:
    """Return a new layer of the target's own shape, with small random weights."""
    head = HeadDecoder(HeadConfig(layer_sizes(config, target), StateEntry.INPUT), target)
    begin_small(head, config.seed)
    with torch.no_grad():  # it begins as the target's state, so that the residual stream is of the right size
        size = target.hidden_size
        head.fc.weight[:, size:] += 0.5 * torch.eye(size)
    own = {"architectures": ["LlamaForCausalLM"], "bias": False}
    return EagleObjective(head, head, target, config.depth, own)


KIND = HeadKind(_make)
