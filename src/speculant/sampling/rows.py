"""Rows of logits and distributions [m, V]: their largest entries, and copies of some rows.

On a CPU, torch would divide this work among threads of its own. Those threads then spin while they wait for more work.
They compete with the kernels' threads, and the target's next pass takes up to half as long again. numpy starts no
threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from speculant.beams import Continuations
from speculant.sampling.distribution import is_numpys

GROUP = 64  # logits of which only the largest is ranked at first
FEW = 2**15  # logits that are ranked at once: torch shares out more of them among its own threads


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the ids [m, count] of the largest logits [m, V] of each row, best first; fewer if V is smaller.

    The largest are among the groups with the largest maxima: for V = 151,936 that takes a seventh of topk's time. The
    ids of a group are the same modulo the number of groups, so that maxima of many groups are computed side by side.
    """
    if logits.numel() <= FEW:
        return logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    num_groups = logits.shape[-1] // GROUP
    ids = torch.arange(num_groups * GROUP, logits.shape[-1], device=logits.device).expand(len(logits), -1)
    if num_groups:
        groups = _group_maxima(logits, num_groups).topk(min(count, num_groups), dim=-1).indices
        within = num_groups * torch.arange(GROUP, device=logits.device)
        ids = torch.cat([(groups.unsqueeze(-1) + within).flatten(1), ids], dim=1)
    return ids.gather(1, logits.gather(1, ids).topk(min(count, ids.shape[1]), dim=-1).indices)


def _group_maxima(logits: Tensor, num_groups: int) -> Tensor:
    """Return the largest logit of each group, [m, num_groups]."""
    groups = logits[:, : num_groups * GROUP].view(-1, GROUP, num_groups)
    return torch.from_numpy(groups.numpy().max(axis=1)) if is_numpys(groups) else groups.amax(1)


def most_likely(logits: Tensor) -> tuple[list[int], list[float]]:
    """Return the token with the largest logit of each row [m, V], the lowest id among equals, and that logit.

    The logit is NaN if any of the row's is.
    """
    if not is_numpys(logits):
        best = logits.argmax(-1, keepdim=True)
        return best[:, 0].tolist(), logits.gather(1, best)[:, 0].tolist()
    rows = logits.numpy()
    tokens = rows.argmax(axis=1)
    return tokens.tolist(), rows[np.arange(len(rows)), tokens].tolist()


def copied(matrix: Tensor) -> Tensor:
    """Return a copy of a matrix [m, V]."""
    return torch.from_numpy(matrix.numpy().copy()) if is_numpys(matrix) else matrix.clone()


def take_rows(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Return copies [len(rows), V] of rows of a matrix [m, V]."""
    return torch.from_numpy(matrix.numpy()[list(rows)]) if is_numpys(matrix) else matrix[list(rows)]


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
