"""Rows of logits and distributions [m, V]: the largest of each, and some of them.

On a processor torch would share them out among threads of its own, which then wait for more work beside those of the
kernels: the target's next pass takes up to half as long again. numpy has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    return torch.from_numpy(groups.numpy().max(axis=1)) if _is_numpys(groups) else groups.amax(1)


def row_maxima(probs: Tensor) -> list[float]:
    """Return the largest probability of each row of distributions [r, V]; 0 or NaN for a row that is none."""
    maxima: list[float] = (probs.numpy().max(axis=1) if _is_numpys(probs) else probs.amax(-1)).tolist()
    return maxima


def take_rows(matrix: Tensor, rows: Sequence[int]) -> Tensor:
    """Return copies [len(rows), V] of rows of a matrix [m, V]."""
    return torch.from_numpy(matrix.numpy()[list(rows)]) if _is_numpys(matrix) else matrix[list(rows)]


def _is_numpys(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
