"""The likeliest tokens of a distribution, for beam search."""

from __future__ import annotations

import math

from torch import Tensor

from speculant.beams import Continuations


def rank(probs: Tensor, count: int) -> list[Continuations]:
    """Return the `count` likeliest tokens of each row of probs [r, V] in float64 with log-probabilities, best first.

    Ties go to the lowest ids. Impossible tokens are left out. A row's result depends on that row alone.
    """
    least = probs.topk(min(count, probs.shape[-1]), dim=-1).values[:, -1:]
    rows, tokens = ((probs >= least) & (probs > 0)).nonzero(as_tuple=True)
    listed: list[list[tuple[int, float]]] = [[] for _ in range(len(probs))]
    for row, token, probability in zip(rows.tolist(), tokens.tolist(), probs[rows, tokens].tolist(), strict=True):
        listed[row].append((token, probability))
    return [_best(each, count) for each in listed]


def _best(weighted: list[tuple[int, float]], count: int) -> Continuations:
    ordered = sorted(weighted, key=lambda each: -each[1])[:count]
    return tuple((token, math.log(probability)) for token, probability in ordered)
