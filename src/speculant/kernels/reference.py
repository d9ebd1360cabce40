"""Operations, distributions and draws in plain PyTorch: the definition that all others are tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from speculant.constraints import unpacked
from speculant.kernels.base import NO_TOKEN, Edits, RowDraw, Sampler, SamplingSettings
from speculant.tree import ids

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., d] to unit root mean square, in float32 or wider, then by weight [d]."""
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each row of x [..., d] to mean 0 and variance 1, then scale by weight [d] and add bias [d]."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d] by angles whose cos and sin are [T, 1, r]; dimensions from r on stay.

    Dimension i is paired with i + r/2, as in Hugging Face checkpoints.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), which is near x for small x and within +-cap; None = x."""
    return x if cap is None else cap * torch.tanh(x / cap)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [..., r, d] of queries [..., r, d] over keys and values [..., k, d].

    mask [r, k] is added to the scores; None = every key is visible. softcap limits the scores. sinks [..., r, 1] are
    scores without a value, which take part in the softmax.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = soft_cap(query @ keys.mT * scale, softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = _widened(scores).softmax(-1).to(query.dtype)
    return weights[..., : keys.shape[-2]] @ values


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_GOLDEN = 0x9E3779B97F4A7C15  # of splitmix64, as in `sampling.choice.mix_in`
_FIRST_LOOK = 64  # candidates of top-p and min-p rows examined first
_WIDEN = 8  # factor of more candidates if these are too few


class ReferenceSampler(Sampler):
    """See `Sampler`. Takes logits and weights of any floating type."""

    @override
    def distribution(
        self, logits: Tensor, settings: Sequence[SamplingSettings], edits: Sequence[Edits | None]
    ) -> Tensor:
        scores = own_scores(logits, edits)
        for row, own in zip(scores, edits, strict=True):
            if own is not None:
                edit(row, own)
        best = scores.amax(-1)
        if bool(best.isfinite().all()):
            return _of_sound_rows(scores, settings)
        failed = ~best.isfinite()[:, None]
        nothing = torch.where(best == -torch.inf, 0.0, torch.nan).to(torch.float64)[:, None]
        return torch.where(failed, nothing, _of_sound_rows(scores.masked_fill(failed, 0.0), settings))

    @override
    def draw(self, weights: Tensor, shared_noise: bool, key: int) -> int:
        return _draw_by_noise(weights, key) if shared_noise else _draw_by_share(weights, key)

    @override
    def draw_rows(self, weights: Tensor, draws: Sequence[RowDraw]) -> list[int]:
        sound = (weights.amax(-1) > 0).tolist()  # False for NaN
        return [self.draw(weights[row], noise, key) if sound[row] else NO_TOKEN for row, noise, key in draws]

    @override
    def normalise(self, weights: Tensor) -> Tensor:
        return weights / weights.sum()


REFERENCE: Sampler = ReferenceSampler()


def own_scores(logits: Tensor, edits: Sequence[Edits | None]) -> Tensor:
    """Return logits in float32 or float64, a copy if they will be edited."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores.clone() if scores is logits and any(own is not None for own in edits) else scores


def edit(row: Tensor, edits: Edits) -> None:
    """Apply edits to scores [V] in place; csrc/edits.h gives the same bits in float32."""
    if edits.mask is not None:
        row.masked_fill_(~unpacked(edits.mask, len(row)).to(row.device), -torch.inf)
    if edits.biased is not None and edits.biases is not None:
        biases = torch.frombuffer(edits.biases, dtype=torch.float64)
        row[ids(edits.biased).to(row.device)] += biases.to(row.device, row.dtype)
    if len(edits.drafted) < edits.ban_below:
        row[ids(sorted(edits.banned)).to(row.device)] = -torch.inf
    if edits.counts is not None:
        _penalise(row, edits, *(each.to(row.device) for each in edits.counts.with_drafted(edits.drafted)))


def _penalise(row: Tensor, edits: Edits, tokens: Tensor, counts: Tensor) -> None:
    """Apply repetition to tokens of prompt and output, presence and frequency to tokens of the output only."""
    if edits.repetition != 1:
        scores = row[tokens]
        row[tokens] = torch.where(scores > 0, scores / edits.repetition, scores * edits.repetition)
    if edits.presence or edits.frequency:
        used = counts > 0
        row[tokens[used]] -= edits.presence + edits.frequency * counts[used].to(row.dtype)


def _of_sound_rows(scores: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    """Return the distributions of scores [r, V], which are finite or -infinity; each row has a finite one."""
    probs = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
    for make, indices in _by_kind(settings):
        if len(indices) == len(settings):
            return make(scores, settings)
        rows = torch.tensor(indices, device=scores.device)
        probs[rows] = make(scores[rows], [settings[i] for i in indices])
    return probs


def _draw_by_share(weights: Tensor, key: int) -> int:
    """Invert the cumulative sum, in float64."""
    cumulative = weights.to(torch.float64).cumsum(0)
    point = cumulative[-1:] * ((key >> 11) * 2.0**-53)
    index = int(torch.searchsorted(cumulative, point, right=True))
    return index if index < len(weights) else int(weights.nonzero()[-1])


def _draw_by_noise(weights: Tensor, key: int) -> int:
    """Take the argmax of log weight + Gumbel noise. Ties go to the lowest id."""
    support = weights.nonzero().flatten()
    if len(support) == 1:  # a point mass needs no noise
        return int(support)
    return int(support[(weights[support].to(torch.float64).log() + gumbel(key, support)).argmax()])


def gumbel(key: int, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise [k] in float64 for token ids [k], a pure function of (key, id)."""
    x = tokens.to(torch.int64) * _signed(_GOLDEN) + _signed(key)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    uniform = (_shift(x, 12).to(torch.float64) + 0.5) * 2.0**-52  # within (0, 1), exactly representable
    return -(-uniform.log()).log()


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_Make = Callable[[Tensor, Sequence[SamplingSettings]], Tensor]


def _by_kind(settings: Sequence[SamplingSettings]) -> list[tuple[_Make, list[int]]]:
    kinds: dict[_Make, list[int]] = {}
    for index, row in enumerate(settings):
        kind = _greedy if row.greedy else _filtered if row.filtered else _plain
        kinds.setdefault(kind, []).append(index)
    return list(kinds.items())


def _greedy(scores: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return probs.scatter_(1, scores.argmax(-1, keepdim=True), 1.0)


def _plain(scores: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    return torch.softmax(scores.to(torch.float64) / _column([p.temperature for p in settings], scores), dim=-1)


def _filtered(scores: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    """Apply top-k, top-p and min-p to the likeliest tokens of each row; take more tokens while they are too few."""
    look, vocab_size = max(p.top_k or _FIRST_LOOK for p in settings), scores.shape[-1]
    while True:
        best, tokens = scores.topk(min(look, vocab_size), dim=-1)
        weights, kept = _keep(best, scores, settings)
        if look >= vocab_size or all(p.top_k or k < look for p, k in zip(settings, kept.tolist(), strict=True)):
            break
        look *= _WIDEN
    _break_ties(scores, best, tokens, kept)
    weights.masked_fill_(_ranks(best) >= kept[:, None], 0.0)
    probs = torch.zeros(scores.shape, dtype=torch.float64, device=scores.device)
    return probs.scatter_add_(1, tokens, weights / _last(weights.cumsum(-1)))


def _keep(best: Tensor, scores: Tensor, settings: Sequence[SamplingSettings]) -> tuple[Tensor, Tensor]:
    """Return the tempered weights [r, m] of each row's best tokens in order, the first 1, and how many are kept [r].

    top-p applies after top-k and keeps the fewest tokens that reach it; min-p is relative to the best.
    Sums run along the row one by one, so other rows and m do not change their bits.
    """
    distance = best.to(torch.float64) - best[:, :1].to(torch.float64)
    weights = (distance / _column([p.temperature for p in settings], scores)).exp()
    weights.masked_fill_(_ranks(best) >= _column([p.top_k or scores.shape[-1] for p in settings], scores), 0.0)
    reached = weights.cumsum(-1)
    top_p, min_p = _column([p.top_p for p in settings], scores), _column([p.min_p for p in settings], scores)
    inside = (reached - weights < top_p * _totals(reached, scores, settings)) | (top_p == 1)
    inside &= (weights > 0) & (weights >= min_p)
    return weights, inside.sum(-1).clamp(min=1)


def _totals(reached: Tensor, scores: Tensor, settings: Sequence[SamplingSettings]) -> Tensor:
    """Return the sum of each row's weights before top-p, [r, 1]: after top-k, if any, else over all tokens."""
    totals = _last(reached).clone()
    for row, p in enumerate(settings):
        if p.top_p < 1 and not p.top_k:
            totals[row, 0] = ((scores[row] - scores[row].max()) / p.temperature).exp().sum()
    return totals


def _last(columns: Tensor) -> Tensor:
    return columns[:, -1:]


def _break_ties(scores: Tensor, best: Tensor, tokens: Tensor, kept: Tensor) -> None:
    """Keep the lowest token ids among equal scores at the cut, in place."""
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
