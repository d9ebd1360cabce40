"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.

Largest entries and copies of rows [m, V] are left to numpy on a CPU. torch would divide this work among threads of its
own. Those threads then spin while they wait for more work. They compete with the kernels' threads, and the target's
next pass takes up to half as long again. numpy starts no threads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculant.beams import Continuations
from speculant.constraints import checked_mask
from speculant.counts import TokenCounts
from speculant.errors import ConstraintError
from speculant.kernels import REFERENCE, Edits, Sampler, SamplingSettings
from speculant.params import SamplingParams
from speculant.types import Request

GROUP = 64  # logits of which only the largest is ranked at first
FEW = 2**15  # logits that are ranked at once: torch shares out more of them among its own threads


class Node(NamedTuple):
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that tokens can be ranked. A beam search's
    always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.search is not None
        return self.request.params.softened if softened else self.request.params

    @property
    def edited(self) -> bool:
        """Whether the logits of single tokens change before the distribution is made."""
        if self.request.constraint is not None:
            return True
        params = self.request.params
        return params.edits and (bool(params.logit_bias) or params.penalised or self.ends_banned)

    @property
    def ends_banned(self) -> bool:
        """Whether fewer than min_tokens output tokens precede it, so that end tokens are banned."""
        return self.request.num_output + len(self.drafted) < self.params.min_tokens


def distribution(logits: Tensor, nodes: Sequence[Node], sampler: Sampler = REFERENCE) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (arXiv 2211.17192, section 2.2).

    Order: constraint, bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. A row without a
    possible token, as after an error of a constraint, is all zeros; one whose logits have NaN or +infinity is all NaN.
    """
    settings, edits, node, params = list[SamplingSettings](), list[Edits | None](), None, None
    for each in nodes:
        if each is not node:  # equal rows may share a node, and requests their parameters
            node, own, now = each, edits_of(each) if each.edited else None, each.params
            if now is not params:
                params, setting = now, sampling_settings(now)
        settings.append(setting)
        edits.append(own)
    return sampler.distribution(logits, settings, edits)


def row_maxima(probs: Tensor) -> list[float]:
    """Return the largest probability of each row [r, V]; 0 or NaN for a row that is not a distribution."""
    maxima: list[float] = (probs.numpy().max(axis=1) if is_numpys(probs) else probs.amax(-1)).tolist()
    return maxima


def is_numpys(tensor: Tensor) -> bool:
    """Whether numpy can read the tensor in place."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return the settings by which a sampler turns edited logits into a distribution."""
    return SamplingSettings(params.temperature, params.top_p, params.min_p, params.top_k)


def edits_of(node: Node) -> Edits:
    """Return the edits of single logits in a node's row: those of its request, with the drafted ancestors."""
    params, request = node.params, node.request
    with request.work:
        return Edits(
            drafted=node.drafted,
            mask=_mask_of(node),
            biased=params.biased if params.logit_bias else None,
            biases=params.biases if params.logit_bias else None,
            banned=request.stops.end_token_ids,
            ban_below=params.min_tokens - request.num_output,
            counts=_counts(request) if params.penalised else None,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )


def _mask_of(node: Node) -> Tensor | None:
    """Return a constraint's mask. One that fails allows no token, so that rows of other requests are not affected."""
    request = node.request
    if request.constraint is None:
        return None
    try:
        return checked_mask(request.constraint, node.drafted)
    except ConstraintError:
        return torch.zeros(1, dtype=torch.int32)


def _counts(request: Request) -> TokenCounts:
    counts = request.counts
    assert counts is not None, "its tokens are not counted"
    assert counts.num_tokens == len(request.tokens), "its counts are not those of its tokens"
    return counts


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
