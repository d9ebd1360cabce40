"""How far a head's distributions are from the target's, with gradients for the head's states alone.

The output head is the target's and stays as it is. Distributions of a few rows are computed at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 256
VARIATION_WEIGHT = 4.0


class HeadDistance(torch.autograd.Function):
    """Mean over rows and heads of w0 KL(p, q_i) + w1 TV(p, q_i) (arXiv 2211.17192, corollary 3.6: 1 - TV is accepted).

    states [k, r, hidden] are those of k heads for the same r rows, target_states [r, hidden] the target's own.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, target_states: Tensor, matrix: Tensor, weights: tuple[float, float]
    ) -> Tensor:
        """Return the mean distance of each head [k]; gradients are computed at once, chunk by chunk."""
        gradients, total = torch.empty_like(states), states.new_zeros(len(states))
        for first in range(0, len(target_states), _ROWS):
            rows = slice(first, first + _ROWS)
            log_p = (target_states[rows] @ matrix.T).log_softmax(-1)
            p = log_p.exp()
            for head in range(len(states)):
                log_q = (states[head, rows] @ matrix.T).log_softmax(-1)
                q = log_q.exp()
                difference = q - p
                sign = difference.sign().mul_(0.5)
                total[head] += weights[0] * ((log_p - log_q) * p).sum() + weights[1] * (difference * sign).sum()
                gradient = (sign - (q * sign).sum(-1, keepdim=True)).mul_(q).mul_(weights[1])
                gradients[head, rows] = gradient.add_(difference, alpha=weights[0]) @ matrix
        ctx.save_for_backward(gradients / len(target_states))
        return total / len(target_states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient for `states`; the other arguments have none."""
        (gradients,) = ctx.saved_tensors
        return gradients * grads[0][:, None, None], None, None, None


def distances(states: Tensor, target_states: Tensor, matrix: Tensor, progress: float) -> Tensor:
    """Return each head's mean distance [k]: divergence at first, total variation in the end of a run."""
    weights = (1.0 - progress, VARIATION_WEIGHT * progress)
    found: Tensor = HeadDistance.apply(states, target_states, matrix, weights)  # type: ignore[no-untyped-call]
    return found


@torch.inference_mode()
def overlaps(states: Tensor, target_states: Tensor, matrix: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Return sums over rows of sum min(p, q_i) [k], and counts of the likeliest token's rank in each q_i [k, ranks]."""
    alpha, shares = torch.zeros(len(states)), torch.zeros(len(states), ranks)
    for first in range(0, len(target_states), _ROWS):
        rows = slice(first, first + _ROWS)
        p = (target_states[rows] @ matrix.T).softmax(-1)
        best = p.argmax(-1, keepdim=True)
        for head in range(len(states)):
            logits = states[head, rows] @ matrix.T
            alpha[head] += torch.minimum(p, logits.softmax(-1)).sum()
            shares[head] += (logits.topk(ranks).indices == best).sum(0)
    return alpha, shares
