"""Random pairs of context-dependent distributions, and the target's distribution computed without speculation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from speculant.lab.exactness.tables import History

NextProbs = Callable[[History], Sequence[float]]  # all tokens so far -> the next token's distribution
Joint = dict[tuple[int, ...], float]  # sequences of tokens -> probability

EXACT = 1e-12  # largest difference of probabilities that rounding explains

NODE_KINDS = ("dense", "rational", "zeros", "equal supports", "disjoint", "tie", "near", "one-hot", "both one-hot")
FULL_SUPPORT = ("dense", "rational", "tie", "near")  # kinds without zeros
MIXED = ("dense",) * 6 + NODE_KINDS


@dataclass(frozen=True)
class Pair:
    """Target and draft distributions for every context; the context determines their kind.

    kinds: the `NODE_KINDS` that occur; repeated ones occur more often.
    """

    seed: int
    vocab_size: int
    kinds: tuple[str, ...] = MIXED

    def target(self, history: History) -> Sequence[float]:
        """Return the target's logits."""
        return _logits(self, history)[0]

    def draft(self, history: History) -> Sequence[float]:
        """Return the draft's logits."""
        return _logits(self, history)[1]


@functools.lru_cache(maxsize=1 << 14)
def _logits(pair: Pair, history: History) -> tuple[tuple[float, ...], ...]:
    """Return the target's logits after a history, and the draft's. Cached: an enumeration needs the same ones often."""
    rng = np.random.default_rng([pair.seed, pair.vocab_size, *history])
    kind = pair.kinds[rng.integers(len(pair.kinds))]
    shift = rng.uniform(-1, 2)  # logits of both signs, for penalties that look at the sign
    distributions = two_distributions(kind, pair.vocab_size, rng)
    return tuple(tuple(math.log(p) + shift if p > 0 else -math.inf for p in each.tolist()) for each in distributions)


def two_distributions(kind: str, vocab_size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw one (p, q) of a kind."""
    p, q = rng.dirichlet(np.ones(vocab_size), size=2)
    mask = _proper_subset(vocab_size, rng)
    match kind:
        case "rational":
            p, q = (rng.integers(1, 4, vocab_size).astype(float) for _ in range(2))
        case "zeros":
            p, q = p * mask, q * _proper_subset(vocab_size, rng)
        case "equal supports":
            p, q = p * mask, q * mask
        case "disjoint":
            p, q = p * mask, q * ~mask
        case "tie":
            q = p
        case "near":
            q = p + 0.02 * q
        case "one-hot":
            p, q = (p, _one_hot(vocab_size, rng)) if rng.random() < 0.5 else (_one_hot(vocab_size, rng), q)
        case "both one-hot":
            p, q = _one_hot(vocab_size, rng), _one_hot(vocab_size, rng)
    return p / p.sum(), q / q.sum()


def _proper_subset(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a mask with at least one True and one False."""
    mask = np.zeros(size, dtype=bool)
    mask[rng.permutation(size)[: rng.integers(1, size)]] = True
    return mask


def _one_hot(size: int, rng: np.random.Generator) -> np.ndarray:
    mask = np.zeros(size)
    mask[rng.integers(size)] = 1.0
    return mask


def softmax(logits: Sequence[float]) -> list[float]:
    """Return the distribution of logits."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def joint_distribution(
    distribution: NextProbs, start: History, length: int, is_over: Callable[[History], bool]
) -> Joint:
    """Return the distribution of the next `length` tokens after `start`, drawn one by one up to an end."""
    return completed({(): 1.0}, distribution, start, length, is_over)


def completed(
    outcomes: Mapping[tuple[int, ...], float],
    distribution: NextProbs,
    start: History,
    length: int,
    is_over: Callable[[History], bool],
) -> Joint:
    """Continue every outcome with `distribution` until it has `length` tokens or is over."""
    joint: Joint = {}
    pending = list(outcomes.items())
    while pending:
        tokens, probability = pending.pop()
        if len(tokens) >= length or (tokens and is_over(tokens)):
            joint[tokens] = joint.get(tokens, 0.0) + probability
            continue
        for token, weight in enumerate(distribution((*start, *tokens))):
            if weight > 0:
                pending.append(((*tokens, token), probability * weight))
    return joint


def deviation(first: Mapping[tuple[int, ...], float], second: Mapping[tuple[int, ...], float]) -> float:
    """Return the largest difference of two distributions' probabilities."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})
