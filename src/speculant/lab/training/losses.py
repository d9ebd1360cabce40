"""Output heads in training, losses and held-out figures.

A loss is the cross-entropy on text, or the distance to a target's distributions.

The losses need a distribution over the whole vocabulary for every token, which is far more data than the rest of a
small model's pass. So value and gradients are computed together for a few rows at a time, which stay in the processor's
cache between operations. The distance begins as the divergence KL(p, q), whose gradient is large where a draft's q is
far from the target's p, and changes to total variation over a run. That is one minus the acceptance rate at temperature
1: sum |p - q| / 2 = 1 - sum min(p, q) (arXiv 2211.17192, section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from speculant.errors import ModelError
from speculant.kernels import soft_cap
from speculant.lab.training.network import hidden_states
from speculant.lab.training.trainer import Objective, Watch
from speculant.models import Decoder

VARIATION_WEIGHT = 4.0  # total variation is below 1 where the divergence is a few nats
DECAY = 0.8  # of the loss from one drafted token to the next, as nearer tokens decide more often
_ROWS = 256  # distributions computed at a time


@dataclass(frozen=True, eq=False)
class OutputHead:
    """Logits of states [r, hidden]: capped(scale * states @ matrix.T), where a soft cap c limits l to c * tanh(l / c).

    matrix [n, hidden]; tokens [n]: the ids of its rows, None = all, in order. softcap: None = no limit.
    """

    matrix: Tensor
    tokens: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Decoder, size: int | None = None) -> OutputHead:
        """Return the output head of a model, of its first `size` tokens; None = all.

        Raises ModelError for a model whose logits have a bias.
        """
        head = model.config.head
        if head.bias:
            raise ModelError(
                "training is not implemented for models with a bias of logits", "use a model without final_logits_bias."
            )
        tokens = torch.tensor(head.tokens) if head.tokens else None
        return cls(model.lm_head.weight[:size], tokens, head.scale, head.softcap)

    def fixed(self) -> OutputHead:
        """Return the same head without gradients."""
        return OutputHead(self.matrix.detach(), self.tokens, self.scale, self.softcap)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the rows [n, hidden] of these ids, by which states are multiplied, without a soft cap."""
        return self.matrix[tokens] * self.scale

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [r, n]."""
        products = states @ self.matrix.T
        return soft_cap(products if self.scale == 1 else products * self.scale, self.softcap)

    def of_products(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient for the logits [r, n] into that for states @ matrix.T, in place."""
        if self.softcap is not None:
            gradient.mul_(1 - (logits / self.softcap).square_())
        return gradient if self.scale == 1 else gradient.mul_(self.scale)


def chunks(rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows. The distributions of one slice fit into memory together."""
    return (slice(first, first + _ROWS) for first in range(0, rows, _ROWS))


class TextObjective(Objective):
    """Cross-entropy of the text, in nats per token."""

    name = "cross-entropy"

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        hidden = hidden_states(model, windows[:, :-1])
        return text_loss(hidden, OutputHead.of(model), windows[:, 1:].flatten())


def text_loss(hidden: Tensor, head: OutputHead, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of tokens [r] that follow states hidden [r, h], of which the head makes logits."""

    def of_rows(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_q = logits.log_softmax(-1)
        loss = -log_q.gather(1, tokens[rows, None]).sum()
        difference = log_q.exp_()  # the gradient is q, minus one at the text's token
        return loss, difference.scatter_add_(1, tokens[rows, None], -hidden.new_ones(len(difference), 1))

    return _mean_loss(hidden, head, of_rows)


class DistillObjective(Objective):
    """The distance of a draft's distributions from the target's."""

    name = "distance to the target"

    def __init__(self, target: Decoder) -> None:
        self._target = target

    @override
    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
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
    weights = (1.0 - progress, VARIATION_WEIGHT * progress)

    def of_rows(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        log_p = target_head.logits(target_hidden[rows]).log_softmax(-1)
        return _distance(logits.log_softmax(-1), log_p, weights)

    return _mean_loss(hidden, head, of_rows)


OfRows = Callable[[slice, Tensor], tuple[Tensor, Tensor]]  # rows and their logits -> the summed loss, its gradient


def _mean_loss(hidden: Tensor, head: OutputHead, of_rows: OfRows) -> Tensor:
    loss: Tensor = _MeanLoss.apply(hidden, head.matrix, head, of_rows)  # type: ignore[no-untyped-call]
    return loss


class _MeanLoss(torch.autograd.Function):
    """The mean of a loss over rows, from its value and its gradient for the logits of some rows, which it may change.

    hidden [r, h]: states; `weight` is the matrix of the output head that makes logits of them. Both have gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, head: OutputHead, of_rows: OfRows) -> Tensor:
        for_hidden, for_weight, total = torch.empty_like(hidden), torch.zeros_like(weight), hidden.new_zeros(())
        for rows in chunks(len(hidden)):
            logits = head.logits(hidden[rows])
            loss, gradient = of_rows(rows, logits)
            total += loss
            head.of_products(gradient, logits)
            torch.mm(gradient, head.matrix, out=for_hidden[rows])
            for_weight.addmm_(gradient.T, hidden[rows])
        scale = 1.0 / len(hidden)
        ctx.save_for_backward(for_hidden.mul_(scale), for_weight.mul_(scale))
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        return hidden * grads[0], weight * grads[0], None, None


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


class _HeadDistance(torch.autograd.Function):
    """Mean over rows and heads of w0 KL(p', q_i) + w1 TV(p, q_i) (arXiv 2211.17192, corollary 3.6: 1 - TV is accepted).

    See `distances`. q_i is of the ids of `head`, None = all; p' is the target's p among these ids alone. `matrix` is
    that of `head`, which has a gradient.
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
        gradients, total = torch.empty_like(states), states.new_zeros(len(states))
        learned = matrix.new_zeros(len(states), *matrix.shape) if ctx.needs_input_grad[4] else None
        for i, rows, goal in _of_heads(states, target_states):
            if goal is not None:
                p, log_among, missed = _restricted(target.logits(goal).log_softmax(-1), head.tokens)
                among = p if head.tokens is None else log_among.exp()
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
        count = states.shape[1]
        ctx.save_for_backward(gradients / count, None if learned is None else learned / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients, learned = ctx.saved_tensors
        own = None if learned is None else torch.einsum("k,knh->nh", grads[0], learned)
        return gradients * grads[0][:, None, None], None, None, None, own, None


def _of_heads(states: Tensor, target_states: Tensor) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Yield each head's place, some of its rows and the target's states there; None = those of the head before."""
    for rows in chunks(states.shape[1]):
        for i in range(len(states)):
            own = target_states if target_states.ndim == 2 else target_states[i]
            yield i, rows, own[rows] if i == 0 or own is not target_states else None


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

    states [k, r, hidden]: of k heads. target_states: the target's for the same r rows [r, hidden], or for each head's
    own rows [k, r, hidden].
    target: the target's output head; own: that of the heads, None = the target's.
    """
    weights = (1.0 - progress, VARIATION_WEIGHT * progress)
    head = target.fixed() if own is None else own
    found: Tensor = _HeadDistance.apply(states, target_states, target, weights, head.matrix, head)  # type: ignore[no-untyped-call]
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

    For the arguments see `distances`.
    """
    alpha, shares = states.new_zeros(len(states)), states.new_zeros(len(states), ranks)
    for i, common, counts in overlap_parts(states, target_states, target, ranks, own or target):
        alpha[i] += common
        shares[i, : len(counts)] += counts
    return alpha, shares


def overlap_parts(
    states: Tensor, target_states: Tensor, target: OutputHead, ranks: int, head: OutputHead
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield a head's place i, sum min(p, q_i) and counts of ranks, see `overlaps`, for some rows of each head."""
    for i, rows, goal in _of_heads(states, target_states):
        if goal is not None:
            p = target.logits(goal).softmax(-1)
            best = p.argmax(-1, keepdim=True)
            p = p if head.tokens is None else p[:, head.tokens]
        logits = head.logits(states[i, rows])
        likeliest = logits.topk(min(ranks, len(head.matrix))).indices
        likeliest = likeliest if head.tokens is None else head.tokens[likeliest]
        yield i, torch.minimum(p, logits.softmax(-1)).sum(), (likeliest == best).sum(0)


_TOKENS_A_PASS = 2048


@dataclass(frozen=True)
class Overlap:
    """The overlap of a draft's distributions q with a target's distributions p at temperature 1."""

    alpha: float  # mean over positions of sum_v min(p, q), the acceptance rate (arXiv 2211.17192, corollary 3.6)
    greedy_agreement: float  # share of positions where both have the same likeliest token
    positions: int

    def summary(self) -> list[str]:
        """Return the figures in a line for people."""
        agreement = f"same likeliest token {self.greedy_agreement:.3f}"
        return [f"sum min(p, q) with the target {self.alpha:.3f}, {agreement}"]


Predicted = tuple[Sequence[Tensor], Tensor]  # logits [r, V] of each model, and the tokens [r] that follow


def evaluate(model: Decoder, windows: Sequence[Tensor], watch: Watch | None = None) -> float:
    """Return the mean cross-entropy, in nats per token, of every token of windows [1 + n_i] but the first."""
    return mean_loss(_predicted([model], windows, watch))


def overlap(target: Decoder, draft: Decoder, windows: Sequence[Tensor], watch: Watch | None = None) -> Overlap:
    """Compare two models' distributions, p and q, at every token of windows [1 + n_i] but the first."""
    return mean_overlap(_predicted([target, draft], windows, watch))


@torch.inference_mode()
def mean_loss(parts: Iterable[Predicted]) -> float:
    """Return the mean cross-entropy, in nats per token, of a model's predictions."""
    total, count = 0.0, 0
    for (logits,), tokens in parts:
        total += float(functional.cross_entropy(logits, tokens, reduction="sum"))
        count += len(tokens)
    return total / count


@torch.inference_mode()
def mean_overlap(parts: Iterable[Predicted]) -> Overlap:
    """Compare the distributions p and q that two models predict."""
    common, agreed, count = 0.0, 0, 0
    for pair, _ in parts:
        p, q = (each.softmax(-1) for each in pair)
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        common += float(torch.minimum(p, q).sum())
        count += len(p)
    return Overlap(common / count, agreed / count, count)


def _predicted(models: Sequence[Decoder], windows: Sequence[Tensor], watch: Watch | None) -> Iterator[Predicted]:
    """Yield the predictions for groups of windows, one per pass; call `watch` with the finished fraction."""
    group: list[Tensor] = []
    for number, window in enumerate(windows, start=1):
        group.append(window)
        if number == len(windows) or sum(map(len, group)) + len(windows[number]) > _TOKENS_A_PASS:
            yield [_logits(each, group) for each in models], torch.cat([each[1:] for each in group])
            group = []
            if watch:
                watch(number / len(windows))


def _logits(model: Decoder, windows: Sequence[Tensor]) -> Tensor:
    """Return the logits [sum of n_i, V] of windows [1 + n_i]; windows are padded at their ends to one length."""
    inputs = [window[:-1] for window in windows]
    padded = pad_sequence(inputs, batch_first=True)  # causal attention: no real row sees the padding
    real = torch.cat([torch.arange(len(row)) + i * padded.shape[1] for i, row in enumerate(inputs)])
    return model.logits(hidden_states(model, padded)[real])
