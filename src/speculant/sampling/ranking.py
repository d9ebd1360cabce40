"""The likeliest tokens of a law, for those who search instead of drawing."""

from __future__ import annotations

import math

from torch import Tensor

from speculant.beams import Continuations


def rank(laws: Tensor, count: int) -> list[Continuations]:
    """Return each law's `count` likeliest tokens and their log-probabilities, best first; laws are [r, V] in float64.

    Ties go to the lowest ids. Impossible tokens are left out. What a row gives depends on that row alone.
    """
    least = laws.topk(min(count, laws.shape[-1]), dim=-1).values[:, -1:]
    rows, tokens = ((laws >= least) & (laws > 0)).nonzero(as_tuple=True)
    listed: list[list[tuple[int, float]]] = [[] for _ in range(len(laws))]
    for row, token, probability in zip(rows.tolist(), tokens.tolist(), laws[rows, tokens].tolist(), strict=True):
        listed[row].append((token, probability))
    return [_best(each, count) for each in listed]


def _best(weighted: list[tuple[int, float]], count: int) -> Continuations:
    ordered = sorted(weighted, key=lambda each: -each[1])[:count]
    return tuple((token, math.log(probability)) for token, probability in ordered)
