"""A request's distribution, computed in the simplest way, and the acceptance that theory predicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from speculant.lab.exactness.tables import History, NextProbs, softmax
from speculant.params import SamplingParams


def transformed(
    logits: Sequence[float], params: SamplingParams, history: History, num_prompt: int, ends: frozenset[int]
) -> list[float]:
    """Work out a request's distribution at one context, token by token and setting by setting.

    This is the definition that the engine's vectorised distribution is compared with; it shares no code with it.
    """
    scores = [logit + params.logit_bias.get(token, 0.0) for token, logit in enumerate(logits)]
    if len(history) - num_prompt < params.min_tokens:
        scores = [-math.inf if token in ends else score for token, score in enumerate(scores)]
    scores = [_penalised(score, token, params, history, num_prompt) for token, score in enumerate(scores)]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))  # ties: lowest id first
    if params.temperature == 0:
        return [float(token == order[0]) for token in range(len(scores))]
    kept = _filtered([score / params.temperature for score in scores], order, params)
    return softmax([score / params.temperature if t in kept else -math.inf for t, score in enumerate(scores)])


def _penalised(score: float, token: int, params: SamplingParams, history: History, num_prompt: int) -> float:
    if token in history:
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
    count = history[num_prompt:].count(token)
    return score - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def _filtered(scores: Sequence[float], order: Sequence[int], params: SamplingParams) -> set[int]:
    """Return the tokens that are left after top-k, then top-p, then min-p."""
    best = order[: params.top_k] if params.top_k else order
    distribution = dict(zip(best, softmax([scores[token] for token in best]), strict=True))
    kept, mass = set(), 0.0
    for token in best:
        if mass < params.top_p and distribution[token] >= params.min_p * distribution[best[0]]:
            kept.add(token)
        mass += distribution[token]
    return kept


def mean_accepted(
    p: NextProbs, q: NextProbs, start: History, length: int, agree: Callable[[float, float], float]
) -> float:
    """Return the expected number of accepted nodes of a chain of `length` drawn from q.

    agree(p, q) is the probability that a token is both drafted and kept: min(p, q) for the ratio test
    (arXiv 2211.17192), p q where draft and target draw independently.
    """
    if length == 0:
        return 0.0
    return sum(
        agree(mine, theirs) * (1 + mean_accepted(p, q, (*start, token), length - 1, agree))
        for token, (mine, theirs) in enumerate(zip(p(start), q(start), strict=True))
        if mine > 0 and theirs > 0
    )
