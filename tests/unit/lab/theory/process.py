"""The process of the formulas, drawn step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

STEPS, BLOCKS = 20_000, 40


def within_three_errors(values: ArrayLike, expected: float, slack: float = 0.0) -> bool:
    """Whether the mean of independent values is within three standard errors of the expected one, or near enough.

    slack: a known bias of the mean, such as that of a ratio or of the first step of a text.
    """
    drawn = np.asarray(values, dtype=np.float64)
    error = drawn.std(ddof=1) / np.sqrt(len(drawn))
    return bool(abs(drawn.mean() - expected) <= 3 * error + slack + 1e-9)


def accepted_in_a_step(rates: Sequence[float], length: int, rng: np.random.Generator) -> int:
    """Draw the number of accepted tokens of `length` drafted ones; the last rate holds for all greater depths."""
    for depth in range(length):
        if rng.random() >= rates[min(depth, len(rates) - 1)]:
            return depth
    return length


def simulated_knowing_speed(
    rate: float, cost: Callable[[int], float], choose: Callable[[int], int], seed: int = 0
) -> list[float]:
    """Return speeds of one sequence whose drafter foresees the next run and `choose`s a length from its tokens.

    They are those of blocks of steps.
    """
    rng = np.random.default_rng(seed)
    tokens, seconds, left = np.zeros(BLOCKS), np.zeros(BLOCKS), 0
    for step in range(STEPS):
        left = left or int(rng.geometric(1 - rate))  # a rejected token ends the run and is the target's own
        length = choose(left)
        assert length < left
        left -= length + 1
        tokens[step * BLOCKS // STEPS] += length + 1
        seconds[step * BLOCKS // STEPS] += cost(length)
    speeds: list[float] = (tokens / seconds).tolist()
    return speeds
