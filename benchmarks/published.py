"""Figures as they were published, and the same from our formulas (docs/theory.md has both)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from speculant.lab.theory.curve import FLAT, VerificationCurve
from speculant.lab.theory.oracle import oracle_speedup
from speculant.lab.theory.speedup import (
    best_length,
    expected_tokens,
    operations,
    speedups,
    step_costs,
    survival,
)

# Tokens per step by acceptance rate and draft length (docs/references.md, metrics).
METRICS_LENGTHS = (3, 5, 7, 10)
METRICS = {
    0.5: (1.88, 1.97, 1.99, 2.00),
    0.7: (2.53, 2.94, 3.14, 3.27),
    0.8: (2.95, 3.69, 4.16, 4.57),
    0.9: (3.44, 4.69, 5.70, 6.86),
    0.95: (3.71, 5.30, 6.73, 8.62),
}
# Of the same article: accepted / drafted for a rate of 0.8, and a larger draft that loses against a smaller one.
UTILISATION = (0.8, 5, 0.54)
LARGE_DRAFT, SMALL_DRAFT = (0.9, 0.5), (0.75, 0.02)  # acceptance rate and cost ratio

# arXiv 2211.17192, table 1: alpha, length, operations, speed.
TABLE_1 = (
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
)
BIGRAM = (0.2, 3, 1.25)  # section 3.6: alpha, length, speed


@dataclass(frozen=True)
class Experiment:
    """A row of table 4 of arXiv 2211.17192."""

    task: str
    draft: str
    temperature: int
    length: int
    alpha: float
    cost_ratio: float
    expected: float
    measured: float


# Its table 4.
TABLE_4 = (
    Experiment("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Experiment("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Experiment("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Experiment("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Experiment("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Experiment("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Experiment("CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Experiment("CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Experiment("CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Experiment("CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Experiment("CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Experiment("CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)
ROUNDING = 0.005  # of an alpha and of a cost ratio with two decimals

# Its appendix A.5: alpha by lenience (table 5), and the speeds given in its text.
LENIENCES = (1.0, 0.5, 0.3, 0.1)
TABLE_5 = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.80, 0.83, 0.90),
}
LENIENT_COST_RATIO = 0.015
LENIENT_SPEEDS = (2.5, 3.1, 3.6, 5.0)  # of T5-small; no length is given
LENIENT_GREEDY = (0.75, 0.75, 0.80, 0.87)
LENIENT_GREEDY_LENGTH, LENIENT_GREEDY_SPEEDS = 8, (3.3, 3.3, 3.9, 4.9)

# The engine akunu (docs/references.md, n-gram tables): alpha, accepted of 4 drafted, speed,
# and speed where the pass costs 1.3.
AKUNU = ((0.5, 0.94, 1.94, 1.5), (0.7, 2.05, 3.05, 2.3), (0.9, 3.28, 4.28, 3.3))
AKUNU_LENGTH, AKUNU_COST = 4, 1.3

LONGEST = 200  # as long as any draft that is considered


def tokens_per_step(alpha: float, length: int) -> float:
    """Return equation 1 of arXiv 2211.17192."""
    return float(expected_tokens(survival(alpha, length))[length])


def speed(alpha: float, length: int, cost_ratio: float = 0.0) -> float:
    """Return theorem 3.8."""
    return float(speedups(survival(alpha, length), step_costs(cost_ratio, FLAT, length))[length])


def more_operations(alpha: float, length: int, ratio: float = 0.0) -> float:
    """Return theorem 3.11."""
    return float(operations(survival(alpha, length), ratio)[length])


def best(alpha: float, cost_ratio: float) -> tuple[int, float]:
    """Return the best length and its speed (section 3.5)."""
    speeds = speedups(survival(alpha, LONGEST), step_costs(cost_ratio, FLAT, LONGEST))
    length = best_length(speeds)
    return length, float(speeds[length])


def oracle_gain(alpha: float, cost_ratio: float) -> float:
    """Return how much faster an oracle for the length is than the best fixed length (section 3.5)."""
    return oracle_speedup(survival(alpha, 4 * LONGEST), cost_ratio, FLAT) / best(alpha, cost_ratio)[1]


def speed_range(row: Experiment) -> tuple[float, float]:
    """Return the lowest and highest expected speed of inputs that are rounded to those of a row of table 4."""
    speeds = [
        speed(row.alpha + a * ROUNDING, row.length, row.cost_ratio + c * ROUNDING)
        for a, c in itertools.product((-1, 1), repeat=2)
    ]
    return min(speeds), max(speeds)


def akunu(alpha: float) -> tuple[float, float, float]:
    """Return expected accepted tokens of 4, tokens per step, and speed where a pass over 5 rows costs 1.3."""
    tokens = tokens_per_step(alpha, AKUNU_LENGTH)
    curve = VerificationCurve((1, AKUNU_LENGTH + 1), (1.0, AKUNU_COST))
    reached = survival(alpha, AKUNU_LENGTH)
    return tokens - 1, tokens, float(speedups(reached, step_costs(0.0, curve, AKUNU_LENGTH))[AKUNU_LENGTH])
