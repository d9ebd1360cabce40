"""Experiments come as often as one budget allows, and each has its turn."""

from __future__ import annotations

from itertools import pairwise

import pytest

from speculant.lengths.costs import LEARNT
from speculant.lengths.explore import BUDGET, Experiments

STEPS = 50_000


def run(prices: dict[str, float]) -> dict[str, list[int]]:
    """Make each experiment whenever it may begin, the first one first; return the steps of each."""
    experiments, made = Experiments(), {method: list[int]() for method in prices}
    for _ in range(STEPS):
        experiments.step += 1
        for method, price in prices.items():
            if not experiments.left("draft", method):
                made[method].append(experiments.step)
                experiments.begin("draft", method, price=price)
                assert experiments.runs("draft", method)
                assert experiments.end("draft", method)
    return made


@pytest.mark.parametrize("price", [0.02, 0.3, 2.0])
def test_one_takes_half_of_the_budget_at_most(price: float) -> None:
    (made,) = run({"some": price}).values()
    assert made[0] == LEARNT
    assert {later - earlier for earlier, later in pairwise(made)} == {round(2 * price / BUDGET)}
    assert len(made) * price <= BUDGET / 2 * STEPS + price


def test_all_together_keep_to_the_budget_in_turns() -> None:
    prices = {"cheap": 0.1, "usual": 1.0, "dear": 10.0, "last": 0.5}
    made = run(prices)
    spent = {method: len(made[method]) * price for method, price in prices.items()}
    assert 0.8 * BUDGET * STEPS <= sum(spent.values()) <= BUDGET * STEPS + sum(prices.values())
    assert all(len(each) > 5 for each in made.values())


def test_what_the_plan_does_itself_waits_for_the_budget_alone() -> None:
    experiments = Experiments()
    experiments.step = LEARNT
    experiments.begin("draft", "some", price=1.0)
    experiments.end("draft", "some")
    assert experiments.left("draft", "some") == 2 * experiments.left("draft", "other") == 2 / BUDGET
    experiments.restart("draft", "some")
    assert experiments.left("draft", "some") == experiments.left("draft", "other") == 1 / BUDGET


def test_one_that_did_not_run_does_not_end() -> None:
    experiments = Experiments()
    assert not experiments.end("draft", "some")
    experiments.begin("draft", "some", price=1.0)
    experiments.restart("draft", "some")
    assert not experiments.runs("draft", "some")
    assert not experiments.end("draft", "some")
    experiments.step = LEARNT
    assert experiments.left("draft", "some") == 0
