"""Each experiment comes as often as its budget allows, whatever the others cost."""

from __future__ import annotations

from itertools import pairwise

import pytest

from speculant.lengths.adaptive import BUDGET, Experiments
from speculant.lengths.costs import LEARNT

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
def test_one_keeps_to_its_budget(price: float) -> None:
    (made,) = run({"some": price}).values()
    assert made[0] == LEARNT
    assert {later - earlier for earlier, later in pairwise(made)} == {round(price / BUDGET)}
    assert len(made) * price <= BUDGET * STEPS + price


def test_a_dear_one_delays_no_other() -> None:
    prices = {"dear": 10.0, "usual": 1.0, "cheap": 0.1}
    assert run(prices) == {method: run({method: price})[method] for method, price in prices.items()}


def test_it_costs_what_it_lost_if_that_is_less() -> None:
    experiments = Experiments()
    experiments.step = LEARNT
    experiments.begin("draft", "some", price=1.0)
    experiments.lose(0.5)
    assert experiments.end("draft", "some")
    assert experiments.left("draft", "some") == 0.5 / BUDGET


def test_one_that_did_not_run_does_not_end() -> None:
    experiments = Experiments()
    assert not experiments.end("draft", "some")
    assert not experiments.runs("draft", "some")
    experiments.step = LEARNT
    assert experiments.left("draft", "some") == 0
