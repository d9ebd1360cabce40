"""The process that the formulas are about, drawn step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from speculant.theory.curve import VerificationCurve

STEPS = 20_000


def accepted_in_a_step(rates: Sequence[float], length: int, rng: np.random.Generator) -> int:
    """Draw how many of `length` drafted tokens are accepted; the last rate holds for all greater depths."""
    for depth in range(length):
        if rng.random() >= rates[min(depth, len(rates) - 1)]:
            return depth
    return length


def simulated_speed(
    rates: Sequence[float], length: int, cost_ratio: float, curve: VerificationCurve, batch: int, seed: int = 0
) -> float:
    """Return tokens per unit of plain decoding's time, over many steps of a batch that drafts one length."""
    rng = np.random.default_rng(seed)
    tokens, seconds = 0, 0.0
    plain = float(curve.relative(batch))  # a plain pass of the batch commits one token per sequence
    for _ in range(STEPS):
        tokens += sum(accepted_in_a_step(rates, length, rng) + 1 for _ in range(batch))
        seconds += length * cost_ratio * plain + float(curve.relative(batch * (length + 1)))
    return tokens * plain / batch / seconds


def simulated_knowing_speed(
    rate: float, cost: Callable[[int], float], choose: Callable[[int], int], seed: int = 0
) -> float:
    """Return the speed of one sequence whose drafter knows the next run and `choose`s a length from its tokens."""
    rng = np.random.default_rng(seed)
    tokens, seconds, left = 0, 0.0, 0
    for _ in range(STEPS):
        left = left or int(rng.geometric(1 - rate))  # a rejected token ends the run and is the target's own
        length = choose(left)
        assert length < left
        left -= length + 1
        tokens += length + 1
        seconds += cost(length)
    return tokens / seconds
