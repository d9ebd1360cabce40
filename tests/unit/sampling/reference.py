"""A request's distribution worked out row by row in numpy, as the sampling parameters are documented."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from speculant.params import SamplingParams


def reference_distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Collection[int] = (),
) -> np.ndarray:
    """Return probs [V] in float64 for logits [V] in float32 or float64; `output` includes drafted ancestors."""
    scores = edited(logits, params, prompt, output, ends)
    order = np.lexsort((np.arange(len(scores)), -scores))  # likeliest first, lowest id on a tie
    distribution = np.zeros(len(scores))
    if params.temperature == 0:
        distribution[order[0]] = 1.0
        return distribution
    kept = order[: kept_count(scores[order], params)]
    distribution[kept] = softmax(scores[kept], params.temperature)
    return distribution


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], ends: Collection[int]
) -> np.ndarray:
    """Apply bias, banned ends and penalties."""
    scores = logits.copy()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if len(output) < params.min_tokens:
        scores[list(ends)] = -np.inf
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    return scores


def kept_count(ordered: np.ndarray, params: SamplingParams) -> int:
    """Return how many of the scores, best first, top-k, top-p and min-p leave."""
    distribution = softmax(ordered[: params.top_k] if params.top_k else ordered, params.temperature)
    before = np.concatenate([[0.0], np.cumsum(distribution)[:-1]])
    inside = (before < params.top_p) if params.top_p < 1 else np.ones(len(distribution), dtype=bool)
    inside &= (distribution > 0) & (distribution >= params.min_p * distribution[0])
    return max(1, int(inside.sum()))


def is_clear_cut(logits: np.ndarray, params: SamplingParams, history: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Tell whether no cut falls so close to a token that rounding decides it."""
    ordered = -np.sort(-edited(logits, params, *history, ()))
    temperature = params.temperature or 1.0
    distribution = softmax(ordered[: params.top_k] if params.top_k else ordered, temperature)
    before = np.concatenate([[0.0], np.cumsum(distribution)])
    clear_of_top_p = params.top_p == 1 or np.abs(before - params.top_p).min() > 1e-5
    return bool(
        clear_of_top_p and (params.min_p == 0 or np.abs(distribution / distribution[0] - params.min_p).min() > 1e-5)
    )


def softmax(scores: np.ndarray, temperature: float) -> np.ndarray:
    """Return the distribution of tempered scores, in float64."""
    weights = np.exp((scores.astype(np.float64) - float(scores.max())) / temperature)
    return weights / weights.sum()
