"""What training makes small: cross-entropy on text, or the distance to a target's laws."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from speculant.models.decoder import Decoder
from speculant.training.passes import hidden_states


class Objective(Protocol):
    """A loss over a batch of windows."""

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """Return the mean loss a token for windows [B, 1 + n]; `progress` in [0, 1] is how far the run is."""
        ...


def batch_logits(model: Decoder, windows: Tensor) -> Tensor:
    """Return logits [B * n, V] of every token's predecessor in windows [B, 1 + n]."""
    return model.logits(hidden_states(model, list(windows[:, :-1])))


class TextObjective:
    """Cross-entropy of the text itself, in nats a token."""

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        return functional.cross_entropy(batch_logits(model, windows), windows[:, 1:].flatten())


class DistillObjective:
    """The distance of a draft's law q to the target's law p at temperature 1 (seed 002 section 6).

    It starts as KL(p, q), whose gradient is large where the draft is far off, and turns into total
    variation, which is one minus the acceptance rate: sum_v |p - q| / 2 = 1 - sum_v min(p, q).
    """

    def __init__(self, target: Decoder) -> None:
        self._target = target

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        with torch.no_grad():
            target = batch_logits(self._target, windows).log_softmax(-1)
        draft = batch_logits(model, windows).log_softmax(-1)
        divergence = functional.kl_div(draft, target, reduction="batchmean", log_target=True)
        variation = 0.5 * (draft.exp() - target.exp()).abs().sum(-1).mean()
        return (1 - progress) * divergence + 4 * progress * variation
