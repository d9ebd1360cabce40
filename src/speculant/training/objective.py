"""What training makes small: cross-entropy on text, or the distance to a target's laws."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from speculant.models.decoder import Decoder
from speculant.training.passes import hidden_states

_ROWS = 128  # laws compared at a time: few enough to stay in a processor's cache
_HEAD_ROWS = 512
_VARIATION_WEIGHT = 4.0  # total variation is below 1 where the divergence is a few nats


class Objective(Protocol):
    """A loss over a batch of windows."""

    name: str  # what `loss` measures, in a few words

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """Return the mean loss a token for windows [B, 1 + n]; `progress` in [0, 1] is how far the run is."""
        ...


def batch_logits(model: Decoder, windows: Tensor) -> Tensor:
    """Return logits [B * n, V], for each token of windows [B, 1 + n] but the first."""
    return model.logits(hidden_states(model, windows[:, :-1]))


class TextObjective:
    """Cross-entropy of the text itself, in nats a token."""

    name = "cross-entropy"

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        hidden = hidden_states(model, windows[:, :-1])
        loss: Tensor = _HeadLoss.apply(hidden, model.lm_head.weight, windows[:, 1:].flatten())  # type: ignore[no-untyped-call]
        return loss


class _HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden [T, h] @ weight [V, h].T against tokens [T].

    Value and gradients are worked out together, some rows at a time: the logits of a whole batch
    would take more memory than all the rest, and be read and written from there several times.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        hidden_grad, weight_grad, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for first in range(0, len(hidden), _HEAD_ROWS):
            rows = slice(first, first + _HEAD_ROWS)
            log_laws = (hidden[rows] @ weight.T).log_softmax(-1)
            total -= log_laws.gather(1, tokens[rows, None]).sum()
            difference = log_laws.exp_()  # d loss / d logits: the law, less one at the token that came
            difference.scatter_add_(1, tokens[rows, None], -hidden.new_ones(len(difference), 1))
            torch.mm(difference, weight, out=hidden_grad[rows])
            weight_grad.addmm_(difference.T, hidden[rows])
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0] / len(hidden_grad)
        return hidden_grad * scale, weight_grad * scale, None


class DistillObjective:
    """The distance of a draft's laws from the target's at temperature 1 (seed 002 section 6).

    It starts as the divergence KL(p, q), whose gradient is large wherever the draft is far off, and
    turns into total variation, one minus the acceptance rate: sum |p - q| / 2 = 1 - sum min(p, q).
    """

    name = "distance to the target"

    def __init__(self, target: Decoder) -> None:
        self._target = target

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        with torch.no_grad():
            target = batch_logits(self._target, windows)
        weights = (1.0 - progress, _VARIATION_WEIGHT * progress)
        loss: Tensor = _LawDistance.apply(batch_logits(model, windows), target, weights)  # type: ignore[no-untyped-call]
        return loss


class _LawDistance(torch.autograd.Function):
    """Mean over rows of w0 KL(p, q) + w1 TV(p, q), with q = softmax(draft), p = softmax(target).

    Value and gradient are worked out together, some rows at a time, because composed from torch's
    operations they would stream some twenty [T, V] intermediates through memory:

        d KL / d draft = q - p        d TV / d draft = q * (s - sum(q * s)),   s = sign(q - p) / 2
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, weights: tuple[float, float]) -> Tensor:
        gradient, total = torch.empty_like(draft), draft.new_zeros(())
        for first in range(0, len(draft), _ROWS):
            rows = slice(first, first + _ROWS)
            total += _distance(draft[rows], target[rows], weights, gradient[rows])
        ctx.save_for_backward(gradient)
        return total / len(draft)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grads[0] / len(gradient)), None, None


def _distance(draft: Tensor, target: Tensor, weights: tuple[float, float], gradient: Tensor) -> Tensor:
    """Return the summed distance of some rows [r, V] and write its gradient."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    difference = q - p
    sign = difference.sign().mul_(0.5)
    divergence = (p * log_p.sub_(log_q)).sum()
    variation = (difference * sign).sum()
    torch.sub(sign, (q * sign).sum(-1, keepdim=True), out=gradient)
    gradient.mul_(q).mul_(weights[1]).add_(difference, alpha=weights[0])
    return weights[0] * divergence + weights[1] * variation
