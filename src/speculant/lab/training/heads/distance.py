"""The distance of a head's distributions from the target's, with gradients for the head's states and output head.

The target's output head is fixed, and most heads predict with it too. Distributions of a few rows are computed at a
time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speculant.lab.training.output import OutputHead, chunks

VARIATION_WEIGHT = 4.0
DECAY = 0.8  # of the loss from one drafted token to the next, as nearer tokens decide more often


class HeadDistance(torch.autograd.Function):
    """Mean over rows and heads of w0 KL(p', q_i) + w1 TV(p, q_i) (arXiv 2211.17192, corollary 3.6: 1 - TV is accepted).

    states [k, r, hidden] are those of k heads for the same r rows, target_states [r, hidden] the target's own. q_i is
    of the ids of `head`, None = all; p' is the target's p among these ids alone. `matrix` is that of `head`, which has
    a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        target_states: Tensor,
        target: OutputHead,
        weights: tuple[float, float],
        matrix: Tensor,
        head: OutputHead,
    ) -> Tensor:
        """Return the mean distance of each head [k]; gradients are computed at once, chunk by chunk."""
        gradients, total = torch.empty_like(states), states.new_zeros(len(states))
        learned = matrix.new_zeros(len(states), *matrix.shape) if ctx.needs_input_grad[4] else None
        for rows in chunks(len(target_states)):
            log_p = target.logits(target_states[rows]).log_softmax(-1)
            p, log_among, missed = _restricted(log_p, head.tokens)
            among = p if head.tokens is None else log_among.exp()
            for i in range(len(states)):
                logits = head.logits(states[i, rows])
                log_q = logits.log_softmax(-1)
                q = log_q.exp()
                difference = q - p
                sign = difference.sign().mul_(0.5)
                total[i] += weights[0] * ((log_among - log_q) * among).sum()
                total[i] += weights[1] * ((difference * sign).sum() + missed / 2)
                gradient = (sign - (q * sign).sum(-1, keepdim=True)).mul_(q).mul_(weights[1])
                gradient.add_(q, alpha=weights[0]).sub_(among, alpha=weights[0])
                head.of_products(gradient, logits)
                gradients[i, rows] = gradient @ matrix
                if learned is not None:
                    learned[i].addmm_(gradient.T, states[i, rows])
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
    states: Tensor, target_states: Tensor, target: OutputHead, progress: float, own: OutputHead | None = None
) -> Tensor:
    """Return each head's mean distance [k]: divergence at the start of a run, total variation at its end.

    target: the target's output head; own: that of the heads, None = the target's.
    """
    weights = (1.0 - progress, VARIATION_WEIGHT * progress)
    head = target.fixed() if own is None else own
    found: Tensor = HeadDistance.apply(states, target_states, target, weights, head.matrix, head)  # type: ignore[no-untyped-call]
    return found


def weighted(each: Tensor) -> Tensor:
    """Return the mean of the distances of successive tokens [k], nearer ones with more weight."""
    weights = DECAY ** torch.arange(len(each), device=each.device)
    return (each * weights).sum() / weights.sum()


@torch.inference_mode()
def overlaps(
    states: Tensor, target_states: Tensor, target: OutputHead, ranks: int, own: OutputHead | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums over rows of sum min(p, q_i) [k], and counts of the likeliest token's rank in each q_i [k, ranks].

    own: see `distances`.
    """
    alpha, shares = states.new_zeros(len(states)), states.new_zeros(len(states), ranks)
    head = own or target
    tokens, ranks = head.tokens, min(ranks, len(head.matrix))
    for rows in chunks(len(target_states)):
        p = target.logits(target_states[rows]).softmax(-1)
        best = p.argmax(-1, keepdim=True)
        p = p if tokens is None else p[:, tokens]
        for i in range(len(states)):
            logits = head.logits(states[i, rows])
            likeliest = logits.topk(ranks).indices
            likeliest = likeliest if tokens is None else tokens[likeliest]
            alpha[i] += torch.minimum(p, logits.softmax(-1)).sum()
            shares[i, :ranks] += (likeliest == best).sum(0)
    return alpha, shares
