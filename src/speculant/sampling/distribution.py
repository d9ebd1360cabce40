"""From logits to the distribution that a token is drawn from: one function, for draft and target alike.

Distributions are float64, whatever the logits are, and each row's distribution depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.kernels.native import Kernels, SamplingSettings
from speculant.params import SamplingParams
from speculant.types import Request

_FIRST_LOOK = 64  # candidates of top-p and min-p rows looked at first, and how much
_WIDEN = 8  # further to look while they are too few


@dataclass(frozen=True)
class Node:
    """A place where a token is chosen: a request's last token followed by `drafted` ancestors.

    softened: a greedy request's distribution is that at temperature 1, so that there is a second best. That of a
    beam search always is.
    """

    request: Request
    drafted: Sequence[int] = ()
    softened: bool = False

    @property
    def params(self) -> SamplingParams:
        """The settings that make the distribution."""
        softened = self.softened or self.request.beams is not None
        return self.request.params.softened if softened else self.request.params


def distribution(logits: Tensor, nodes: Sequence[Node], kernels: Kernels | None = None) -> Tensor:
    """Return distributions [r, V] in float64 for logits [r, V], one node per row (arXiv 2211.17192, section 2.2).

    Order: bias, end tokens below min_tokens, penalties, temperature, top-k, top-p, min-p. With
    native kernels, float32 logits are theirs.
    """
    scores = _edited(logits, nodes)
    if kernels is not None and scores.dtype == torch.float32:
        return kernels.probs(scores, [sampling_settings(node.params) for node in nodes])
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


def _by_kind(nodes: Sequence[Node]) -> list[tuple[Callable[[Tensor, Sequence[SamplingParams]], Tensor], list[int]]]:
    kinds: dict[Callable[[Tensor, Sequence[SamplingParams]], Tensor], list[int]] = {}
    for index, node in enumerate(nodes):
        params = node.params
        filtered = params.top_k or params.top_p < 1 or params.min_p > 0
        kind = _greedy if params.greedy else _filtered if filtered else _plain
        kinds.setdefault(kind, []).append(index)
    return list(kinds.items())


def _edited(logits: Tensor, nodes: Sequence[Node]) -> Tensor:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(edits(node.params) for node in nodes):
        scores = scores.clone() if scores is logits else scores
        for row, node in zip(scores, nodes, strict=True):
            _edit(row, node)
    return scores


def edits(params: SamplingParams) -> bool:
    """Whether these settings change the logits of single tokens."""
    return bool(params.logit_bias) or params.penalised or params.min_tokens > 0


def _edit(row: Tensor, node: Node) -> None:
    """Apply what depends on single tokens to scores [V] in place."""
    params, request = node.params, node.request
    if params.logit_bias:
        values = list(params.logit_bias.values())
        row[_ids(list(params.logit_bias), row)] += torch.tensor(values, dtype=row.dtype, device=row.device)
    if request.num_output + len(node.drafted) < params.min_tokens and request.end_token_ids:
        row[_ids(sorted(request.end_token_ids), row)] = -torch.inf
    if params.penalised:
        _penalise(row, params, [*request.tokens, *node.drafted], len(request.prompt))


def _penalise(row: Tensor, params: SamplingParams, history: Sequence[int], num_prompt: int) -> None:
    """Repetition counts prompt and output; presence and frequency count the output alone."""
    if params.repetition_penalty != 1:
        seen = torch.unique(_ids(history, row))
        scores = row[seen]
        row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
    if len(history) > num_prompt and (params.presence_penalty or params.frequency_penalty):
        seen, counts = torch.unique(_ids(history[num_prompt:], row), return_counts=True)
        row[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(row.dtype)


def _ids(tokens: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=like.device)


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
