"""The distance of a head's distributions from the target's, with gradients for the head's states and output head.

The target's output head is fixed, and most heads predict with it too. Distributions of a few rows are computed at a
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROWS = 256
VARIATION_WEIGHT = 4.0


@dataclass(frozen=True)
class OutputHead:
    """A head's own output head: matrix [n, hidden], and the target's ids [n] of its rows."""

    matrix: Tensor
    tokens: Tensor


class HeadDistance(torch.autograd.Function):
    """Mean over rows and heads of w0 KL(p', q_i) + w1 TV(p, q_i) (arXiv 2211.17192, corollary 3.6: 1 - TV is accepted).

    states [k, r, hidden] are those of k heads for the same r rows, target_states [r, hidden] the target's own. q_i is
    of the ids `tokens`, None = all; p' is the target's p among these ids alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        target_states: Tensor,
        target_matrix: Tensor,
        weights: tuple[float, float],
        matrix: Tensor,
        tokens: Tensor | None,
    ) -> Tensor:
        """Return the mean distance of each head [k]; gradients are computed at once, chunk by chunk."""
        gradients, total = torch.empty_like(states), states.new_zeros(len(states))
        learned = matrix.new_zeros(len(states), *matrix.shape) if ctx.needs_input_grad[4] else None
        for first in range(0, len(target_states), _ROWS):
            rows = slice(first, first + _ROWS)
            log_p = (target_states[rows] @ target_matrix.T).log_softmax(-1)
            p, log_among, missed = _restricted(log_p, tokens)
            among = p if tokens is None else log_among.exp()
            for head in range(len(states)):
                log_q = (states[head, rows] @ matrix.T).log_softmax(-1)
                q = log_q.exp()
                difference = q - p
                sign = difference.sign().mul_(0.5)
                total[head] += weights[0] * ((log_among - log_q) * among).sum()
                total[head] += weights[1] * ((difference * sign).sum() + missed / 2)
                gradient = (sign - (q * sign).sum(-1, keepdim=True)).mul_(q).mul_(weights[1])
                gradient.add_(q, alpha=weights[0]).sub_(among, alpha=weights[0])
                gradients[head, rows] = gradient @ matrix
                if learned is not None:
                    learned[head].addmm_(gradient.T, states[head, rows])
        ctx.save_for_backward(gradients / len(target_states), None if learned is None else learned / len(target_states))
        return total / len(target_states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for `states` and `matrix`; the other arguments have none."""
        gradients, learned = ctx.saved_tensors
        own = None if learned is None else torch.einsum("k,knh->nh", grads[0], learned)
        return gradients * grads[0][:, None, None], None, None, None, own, None


def _restricted(log_p: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return p and log p' of the ids `tokens` [r, n], and the sum over rows of p of the others; None = all ids."""
    if tokens is None:
        return log_p.exp(), log_p, log_p.new_zeros(())
    log_p = log_p[:, tokens]
    log_mass = log_p.logsumexp(-1, keepdim=True)
    return log_p.exp(), log_p - log_mass, -torch.expm1(log_mass).sum()


def distances(
    states: Tensor, target_states: Tensor, matrix: Tensor, progress: float, own: OutputHead | None = None
) -> Tensor:
    """Return each head's mean distance [k]: divergence at the start of a run, total variation at its end.

    matrix [V, hidden]: the target's output head; own: that of the heads, None = the target's.
    """
    weights = (1.0 - progress, VARIATION_WEIGHT * progress)
    of = (matrix.detach(), None) if own is None else (own.matrix, own.tokens)
    found: Tensor = HeadDistance.apply(states, target_states, matrix, weights, *of)  # type: ignore[no-untyped-call]
    return found


@torch.inference_mode()
def overlaps(
    states: Tensor, target_states: Tensor, matrix: Tensor, ranks: int, own: OutputHead | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums over rows of sum min(p, q_i) [k], and counts of the likeliest token's rank in each q_i [k, ranks].

    own: see `distances`.
    """
    alpha, shares = torch.zeros(len(states)), torch.zeros(len(states), ranks)
    ranks, q_matrix = (ranks, matrix) if own is None else (min(ranks, len(own.tokens)), own.matrix)
    for first in range(0, len(target_states), _ROWS):
        rows = slice(first, first + _ROWS)
        p = (target_states[rows] @ matrix.T).softmax(-1)
        best = p.argmax(-1, keepdim=True)
        p = p if own is None else p[:, own.tokens]
        for head in range(len(states)):
            logits = states[head, rows] @ q_matrix.T
            likeliest = logits.topk(ranks).indices
            likeliest = likeliest if own is None else own.tokens[likeliest]
            alpha[head] += torch.minimum(p, logits.softmax(-1)).sum()
            shares[head, :ranks] += (likeliest == best).sum(0)
    return alpha, shares
