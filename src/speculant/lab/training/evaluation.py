"""The loss of a model on held-out text, and the overlap of a draft with its target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from speculant.lab.training.passes import hidden_states
from speculant.lab.training.trainer import Watch
from speculant.models import Decoder

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


def evaluate(model: Decoder, windows: Sequence[Tensor], watch: Watch | None = None) -> float:
    """Return the mean cross-entropy, in nats per token, of every token of windows [1 + n_i] but the first."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for group in _grouped(windows, watch):
            logits = _logits(model, group)
            following = torch.cat([window[1:] for window in group])
            total += float(functional.cross_entropy(logits, following, reduction="sum"))
            count += len(following)
    return total / count


def overlap(target: Decoder, draft: Decoder, windows: Sequence[Tensor], watch: Watch | None = None) -> Overlap:
    """Compare two models' distributions, p and q, at every token of windows [1 + n_i] but the first."""
    models = (target, draft)
    return mean_overlap([_logits(each, group) for each in models] for group in _grouped(windows, watch))


@torch.inference_mode()
def mean_overlap(logits: Iterable[Sequence[Tensor]]) -> Overlap:
    """Compare distributions p and q, given as pairs of logits [r, V]."""
    common, agreed, count = 0.0, 0, 0
    for pair in logits:
        p, q = (each.softmax(-1) for each in pair)
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        common += float(torch.minimum(p, q).sum())
        count += len(p)
    return Overlap(common / count, agreed / count, count)


def _logits(model: Decoder, windows: Sequence[Tensor]) -> Tensor:
    """Return the logits [sum of n_i, V] of windows [1 + n_i]; windows are padded at their ends to one length."""
    inputs = [window[:-1] for window in windows]
    padded = pad_sequence(inputs, batch_first=True)  # causal attention: no real row sees the padding
    real = torch.cat([torch.arange(len(row)) + i * padded.shape[1] for i, row in enumerate(inputs)])
    return model.logits(hidden_states(model, padded)[real])


def _grouped(windows: Sequence[Tensor], watch: Watch | None) -> Iterator[list[Tensor]]:
    """Yield groups of windows, one per pass; call `watch` with the finished fraction."""
    group: list[Tensor] = []
    for number, window in enumerate(windows, start=1):
        group.append(window)
        if number == len(windows) or sum(map(len, group)) + len(windows[number]) > _TOKENS_A_PASS:
            yield group
            group = []
            if watch:
                watch(number / len(windows))
