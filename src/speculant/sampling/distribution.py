"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speculant.kernels.native import Kernels, SamplingSettings
from speculant.params import SamplingParams
from speculant.sampling.edits import NativeEdits, edit
from speculant.sampling.node import Node as Node

_FIRST_LOOK = 64  # candidates of top-p and min-p rows looked at first, and how much
_WIDEN = 8  # further to look while they are too few


def distribution(logits: Tensor, nodes: Sequence[Node], kernels: Kernels | None = None) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (seed 002 section 2.2).

    Order: constraint, bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. With
    native kernels, float32 logits are theirs. A row without a possible token is all zeros; one whose scores have NaN
    or +infinity is all NaN.
    """
    if kernels is not None and logits.dtype != torch.float64:
        settings, edits = [sampling_settings(node.params) for node in nodes], NativeEdits(nodes)
        return kernels.probs(_own_scores(logits, nodes), settings, edits.address)
    scores = _edited(logits, nodes)
    best = scores.amax(-1)
    if bool(best.isfinite().all()):
        return _of_sound_rows(scores, nodes)
    failed = ~best.isfinite()[:, None]
    nothing = torch.where(best == -torch.inf, 0.0, torch.nan).to(torch.float64)[:, None]
    return torch.where(failed, nothing, _of_sound_rows(scores.masked_fill(failed, 0.0), nodes))


def _of_sound_rows(scores: Tensor, nodes: Sequence[Node]) -> Tensor:
    """Return the distributions of scores [r, V] that are numbers or -infinity, of which each row has a finite one."""
    probs = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
    for make, indices in _by_kind(nodes):
        if len(indices) == len(nodes):
            return make(scores, [node.params for node in nodes])
        rows = torch.tensor(indices, device=scores.device)
        probs[rows] = make(scores[rows], [nodes[i].params for i in indices])
    return probs


def sampling_settings(params: SamplingParams) -> SamplingSettings:
    """Return what the native kernels make a distribution by, once the logits are edited."""
    return SamplingSettings(0.0 if params.greedy else params.temperature, params.top_p, params.min_p, params.top_k)


def _edited(logits: Tensor, nodes: Sequence[Node]) -> Tensor:
    scores = _own_scores(logits, nodes)
    for row, node in zip(scores, nodes, strict=True):
        if node.edited:
            edit(row, node)
    return scores


def _own_scores(logits: Tensor, nodes: Sequence[Node]) -> Tensor:
    """Return logits in float32 or float64, a copy if they will be edited."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores.clone() if scores is logits and any(node.edited for node in nodes) else scores


def _by_kind(nodes: Sequence[Node]) -> list[tuple[Callable[[Tensor, Sequence[SamplingParams]], Tensor], list[int]]]:
    kinds: dict[Callable[[Tensor, Sequence[SamplingParams]], Tensor], list[int]] = {}
    for index, node in enumerate(nodes):
        params = node.params
        filtered = params.top_k or params.top_p < 1 or params.min_p > 0
        kind = _greedy if params.greedy else _filtered if filtered else _plain
        kinds.setdefault(kind, []).append(index)
    return list(kinds.items())


def _greedy(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return point_masses(scores.argmax(-1), scores.shape[-1])


def point_masses(tokens: Tensor, vocab_size: int) -> Tensor:
    """Return distributions [r, V] that put everything on tokens [r]."""
    probs = torch.zeros(len(tokens), vocab_size, dtype=torch.float64, device=tokens.device)
    return probs.scatter_(1, tokens[:, None], 1.0)


def _plain(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    return torch.softmax(scores.to(torch.float64) / _column([p.temperature for p in params], scores), dim=-1)


def _filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top-k, top-p and min-p to the few likeliest tokens of each row, or to all if that is too few."""
    look, vocab_size = max(p.top_k or _FIRST_LOOK for p in params), scores.shape[-1]
    while True:
        best, tokens = scores.topk(min(look, vocab_size), dim=-1)
        weights, kept = _keep(best, scores, params)
        if look >= vocab_size or all(p.top_k or k < look for p, k in zip(params, kept.tolist(), strict=True)):
            break
        look *= _WIDEN
    _break_ties(scores, best, tokens, kept)
    weights.masked_fill_(_ranks(best) >= kept[:, None], 0.0)
    probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return probs.scatter_add_(1, tokens, weights / _last(weights.cumsum(-1)))


def _keep(best: Tensor, scores: Tensor, params: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """Return the tempered weights [r, m] of a row's best in order, the first being 1, and how many are kept [r].

    top-p keeps the fewest that together reach it, of what top-k left; min-p is relative to the best.
    Sums run along the row one by one, so that neither the other rows nor m can change a bit of them.
    """
    distance = best.to(torch.float64) - best[:, :1].to(torch.float64)
    weights = (distance / _column([p.temperature for p in params], scores)).exp()
    weights.masked_fill_(_ranks(best) >= _column([p.top_k or scores.shape[-1] for p in params], scores), 0.0)
    reached = weights.cumsum(-1)
    top_p, min_p = _column([p.top_p for p in params], scores), _column([p.min_p for p in params], scores)
    inside = (reached - weights < top_p * _totals(reached, scores, params)) | (top_p == 1)
    inside &= (weights > 0) & (weights >= min_p)
    return weights, inside.sum(-1).clamp(min=1)


def _totals(reached: Tensor, scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return what each row's weights sum to before top-p cuts, [r, 1]: after top-k, if any, else over all tokens."""
    totals = _last(reached).clone()
    for row, p in enumerate(params):
        if p.top_p < 1 and not p.top_k:
            totals[row, 0] = ((scores[row] - scores[row].max()) / p.temperature).exp().sum()
    return totals


def _last(columns: Tensor) -> Tensor:
    return columns[:, -1:]


def _break_ties(scores: Tensor, best: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Where the cut falls among equal scores, keep those with the lowest token ids (in place)."""
    border = best.gather(1, kept[:, None] - 1)
    cut = (scores >= border).sum(-1) > kept
    for row in cut.nonzero().flatten().tolist():
        last = int(kept[row])
        first = int((best[row] > border[row]).sum())
        tokens[row, first:last] = (scores[row] == border[row]).nonzero().flatten()[: last - first]


def _ranks(best: Tensor) -> Tensor:
    return torch.arange(best.shape[-1], device=best.device)[None]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
