"""Speculative execution of two functions: the outcome has f's distribution, and its errors are raised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from speculant import SpeculantError, speculate
from speculant.errors import DistributionError
from speculant.lab.exactness.enumeration import Branches, EnumeratingChance, enumerate_outcomes
from speculant.lab.exactness.tables import EXACT, NODE_KINDS, two_distributions
from speculant.sampling.chance import Purpose, Stream
from speculant.verification.execution import Weights
from tests.examples import examples

PATIENCE = 20.0  # seconds until a test that waits for another thread gives up
Law = Sequence[float]


def always(weights: Weights) -> Callable[[], Weights]:
    return lambda: weights


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_the_outcome_has_the_distribution_of_f(kind: str) -> None:
    """A draw of the approximation is kept as often as possible: with probability sum min(p, q)."""
    for seed in range(examples(60, least=15)):
        p, q = two_distributions(kind, 2 + seed % 3, np.random.default_rng(seed))

        def run(branches: Branches, p: Law = p, q: Law = q) -> tuple[int, bool]:
            chance = EnumeratingChance(branches)
            done = speculate(always(p), "g{}".format, always(q), chance=chance)
            assert done.result == f"g{done.outcome}"
            return done.outcome, done.accepted

        found = enumerate_outcomes(run)
        for outcome, probability in enumerate(p):
            reached = sum(found.get((outcome, accepted), 0.0) for accepted in (True, False))
            assert reached == pytest.approx(probability, abs=EXACT)
            assert found.get((outcome, True), 0.0) == pytest.approx(min(probability, q[outcome]), abs=EXACT)


def test_f_and_g_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def f() -> Law:
        meeting.wait()
        return [1.0, 0.0]

    def g(outcome: int) -> int:
        meeting.wait()
        return outcome + 10

    done = speculate(f, g, always([1.0, 0.0]))
    assert (done.result, done.outcome, done.accepted) == (10, 0, True)


def test_a_dropped_run_ends_before_the_call() -> None:
    replaced, ended = threading.Event(), list[int]()

    def g(outcome: int) -> int:
        if outcome == 0:
            assert replaced.wait(PATIENCE)
        replaced.set()
        ended.append(outcome)
        return outcome

    done = speculate(always([0.0, 1.0]), g, always([1.0, 0.0]))
    assert (done.result, done.accepted) == (1, False)
    assert ended == [1, 0]


def failing_on(*outcomes: int) -> Callable[[int], int]:
    def g(outcome: int) -> int:
        if outcome in outcomes:
            raise ArithmeticError(f"outcome {outcome}")
        return outcome

    return g


def test_an_error_on_the_kept_outcome_is_raised() -> None:
    sure, other = always([1.0, 0.0]), always([0.0, 1.0])
    with pytest.raises(ArithmeticError, match="outcome 0"):
        speculate(sure, failing_on(0), sure)
    with pytest.raises(ArithmeticError, match="outcome 1"):
        speculate(other, failing_on(0, 1), sure)


def test_an_error_on_a_dropped_outcome_is_dropped() -> None:
    done = speculate(always([0.0, 1.0]), failing_on(0), always([1.0, 0.0]))
    assert (done.result, done.accepted) == (1, False)


def test_errors_of_both_distributions_are_raised() -> None:
    def broken() -> Law:
        raise ArithmeticError("no distribution")

    with pytest.raises(ArithmeticError, match="no distribution"):
        speculate(broken, failing_on(0), always([1.0]))
    with pytest.raises(ArithmeticError, match="no distribution"):
        speculate(always([1.0]), failing_on(), broken)


@pytest.mark.parametrize(
    "weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf")], [[1.0]], 1.0, None]
)
def test_an_invalid_distribution_is_refused(weights: Any) -> None:
    with pytest.raises(DistributionError, match="^f gave"):
        speculate(always(weights), failing_on(), always([0.5, 0.5]))
    ran = list[int]()
    with pytest.raises(DistributionError, match="^the approximation gave"):
        speculate(lambda: [float(ran.append(0) is None)], ran.append, always(weights))
    assert ran == []


def test_distributions_over_different_outcomes_are_refused() -> None:
    with pytest.raises(
        DistributionError, match="f's distribution has 3 outcomes and the approximation's has 2"
    ) as caught:
        speculate(always([0.2, 0.3, 0.5]), failing_on(), always([0.5, 0.5]))
    assert isinstance(caught.value, SpeculantError)


@pytest.mark.parametrize(
    "make", [list, tuple, np.array, torch.tensor, lambda distribution: torch.tensor(distribution).float()]
)
def test_weights_come_in_any_scale_and_kind(make: Callable[[Law], Weights]) -> None:
    """0.25 and 0.75 both times: the draw is always kept."""
    small, large = always(make([0.5, 1.5])), always(make([1.0, 3.0]))
    for seed in range(20):
        for f, approximation in ((small, large), (large, small)):
            chance = Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), 0)
            assert speculate(f, failing_on(), approximation, chance=chance).accepted


def test_both_distributions_get_the_arguments() -> None:
    def f(size: int, last: float) -> Law:
        return [0.0] * (size - 1) + [last]

    assert speculate(f, failing_on(), f, 3, 1.0).outcome == 2


def test_only_runs_with_a_stream_repeat_themselves() -> None:
    even = always([1.0] * 1000)

    def outcomes(seed: int | None) -> list[int]:
        chances = [None if seed is None else Stream(seed, (Purpose.ACCEPT, Purpose.DRAW), i) for i in range(5)]
        return [speculate(even, failing_on(), even, chance=chance).outcome for chance in chances]

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert outcomes(None) != outcomes(None)
