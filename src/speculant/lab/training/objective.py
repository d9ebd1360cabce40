"""Training losses: cross-entropy on text, or the distance to a target's distributions.

Both losses need a distribution over the whole vocabulary for every token, which is far more data than the
rest of a small model's pass. So value and gradients are computed together for a few rows at a time, which
stay in the processor's cache between operations.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from speculant.lab.training.output import OutputHead, chunks
from speculant.lab.training.passes import hidden_states
from speculant.models import Decoder

_VARIATION_WEIGHT = 4.0  # total variation is below 1 where the divergence is a few nats


class Objective(Protocol):
    """A loss over a batch of windows."""

    name: str  # of the quantity that `loss` measures

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """Return the mean loss per token of windows [B, 1 + n]; `progress` of the run is in [0, 1]."""
        ...


class TextObjective:
    """Cross-entropy of the text, in nats per token."""

    name = "cross-entropy"

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        hidden = hidden_states(model, windows[:, :-1])
        return text_loss(hidden, OutputHead.of(model), windows[:, 1:].flatten())


def text_loss(hidden: Tensor, head: OutputHead, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens [r] that follow states hidden [r, h], of which the head makes logits."""
    loss: Tensor = _TextLoss.apply(hidden, head.matrix, head, tokens)  # type: ignore[no-untyped-call]
    return loss


class DistillObjective:
    """The distance of a draft's distributions q from the target's p at temperature 1 (arXiv 2211.17192, section 6).

    It begins as the divergence KL(p, q), whose gradient is large where q is far from p, and changes to total variation,
    which is one minus the acceptance rate: sum |p - q| / 2 = 1 - sum min(p, q).
    """

    name = "distance to the target"

    def __init__(self, target: Decoder) -> None:
        self._target = target

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`."""
        with torch.no_grad():
            target_hidden = hidden_states(self._target, windows[:, :-1])
        hidden = hidden_states(model, windows[:, :-1])
        return distribution_distance(hidden, OutputHead.of(model), target_hidden, OutputHead.of(self._target), progress)


def distribution_distance(
    hidden: Tensor, head: OutputHead, target_hidden: Tensor, target_head: OutputHead, progress: float
) -> Tensor:
    """Return the mean distance of a draft's distributions from a target's, with gradients for the draft.

    hidden [r, h], target_hidden [r, H]: states for the same tokens, of which the heads make logits [r, V].
    """
    weights = (1.0 - progress, _VARIATION_WEIGHT * progress)
    loss: Tensor = _DistributionDistance.apply(hidden, head.matrix, head, target_hidden, target_head, weights)  # type: ignore[no-untyped-call]
    return loss


class _HeadGradients:
    """Gradients of a sum over rows, for hidden [T, h] and for the matrix [V, h] of the output head that reads it."""

    def __init__(self, hidden: Tensor, head: OutputHead) -> None:
        self._inputs = hidden, head
        self._hidden, self._weight = torch.empty_like(hidden), torch.zeros_like(head.matrix)

    def add(self, rows: slice, gradient: Tensor, logits: Tensor) -> None:
        """Add the gradient [r, V] for the logits of some rows. Changes it."""
        hidden, head = self._inputs
        head.of_products(gradient, logits)
        torch.mm(gradient, head.matrix, out=self._hidden[rows])
        self._weight.addmm_(gradient.T, hidden[rows])

    def mean(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of the mean over rows."""
        scale = 1.0 / len(self._hidden)
        return self._hidden.mul_(scale), self._weight.mul_(scale)


class _TextLoss(torch.autograd.Function):
    """Mean of -log q(token) over rows. `weight` is the output head's matrix, which has a gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: OutputHead, tokens: Tensor) -> Tensor:
        gradients, total = _HeadGradients(hidden, head), hidden.new_zeros(())
        for rows in chunks(len(hidden)):
            logits = head.logits(hidden[rows])
            log_q = logits.log_softmax(-1)
            total -= log_q.gather(1, tokens[rows, None]).sum()
            difference = log_q.exp_()  # the gradient is q, minus one at the text's token
            difference.scatter_add_(1, tokens[rows, None], -hidden.new_ones(len(difference), 1))
            gradients.add(rows, difference, logits)
        ctx.save_for_backward(*gradients.mean())
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        return hidden * grads[0], weight * grads[0], None, None


class _DistributionDistance(torch.autograd.Function):
    """Mean over rows of w0 KL(p, q) + w1 TV(p, q), where p is the target's distribution and q the draft's."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: OutputHead,
        target_hidden: Tensor,
        target_head: OutputHead,
        weights: tuple[float, float],
    ) -> Tensor:
        gradients, total = _HeadGradients(hidden, head), hidden.new_zeros(())
        for rows in chunks(len(hidden)):
            logits = head.logits(hidden[rows])
            log_p = target_head.logits(target_hidden[rows]).log_softmax(-1)
            distance, difference = _distance(logits.log_softmax(-1), log_p, weights)
            total += distance
            gradients.add(rows, difference, logits)
        ctx.save_for_backward(*gradients.mean())
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        return hidden * grads[0], weight * grads[0], None, None, None, None


def _distance(log_q: Tensor, log_p: Tensor, weights: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the summed distance of distributions [r, V] and its gradient [r, V] for the logits of q. Changes log_p.

    d KL = q - p        d TV = q * (s - sum(q * s)), with s = sign(q - p) / 2
    """
    q, p = log_q.exp(), log_p.exp()
    difference = q - p
    sign = difference.sign().mul_(0.5)
    divergence = (log_p.sub_(log_q).mul_(p)).sum()
    variation = (difference * sign).sum()
    gradient = (sign - (q * sign).sum(-1, keepdim=True)).mul_(q).mul_(weights[1])
    return weights[0] * divergence + weights[1] * variation, gradient.add_(difference, alpha=weights[0])
