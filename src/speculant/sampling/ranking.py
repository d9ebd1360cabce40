"""The likeliest tokens of a distribution, for beam search."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

from speculant.beams import Continuations


def rank(probs: Tensor, count: int, ends: Collection[int] = ()) -> list[Continuations]:
    """Return the continuations of each row of probs [r, V] in float64 that a search of width `count` may take.

    These are the `count` likeliest tokens and the `count` likeliest that are not among `ends`, with log-probabilities,
    best first. Ties go to the lowest ids. Impossible tokens are left out. A row's result depends on that row alone.
    """
    best = _best(probs, count)
    if ends:
        others = probs.index_fill(-1, torch.tensor(sorted(ends), device=probs.device), 0.0)
        best = [{**mine, **other} for mine, other in zip(best, _best(others, count), strict=True)]
    return [_ordered(each) for each in best]


def _best(probs: Tensor, count: int) -> list[dict[int, float]]:
    """Return the `count` likeliest tokens of each row with their probabilities."""
    least = probs.topk(min(count, probs.shape[-1]), dim=-1).values[:, -1:]
    rows, tokens = ((probs >= least) & (probs > 0)).nonzero(as_tuple=True)
    listed: list[list[tuple[int, float]]] = [[] for _ in range(len(probs))]
    for row, token, probability in zip(rows.tolist(), tokens.tolist(), probs[rows, tokens].tolist(), strict=True):
        listed[row].append((token, probability))
    return [dict(sorted(each, key=lambda pair: -pair[1])[:count]) for each in listed]


def _ordered(weighted: dict[int, float]) -> Continuations:
    pairs = sorted(weighted.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple((token, math.log(probability)) for token, probability in pairs)
