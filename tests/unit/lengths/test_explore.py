"""Experiments come soon at first, and then as often as their price allows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from speculant.lengths.explore import BUDGET, FIRST_WAIT, MOST_REPEATS, Experiments


def run(experiments: Experiments, steps: int, price: float, again: bool = False) -> list[int]:
    """Make an experiment whenever it is due; return the steps of these."""
    made = list[int]()
    for _ in range(steps):
        experiments.step += 1
        if not experiments.left("draft", "some"):
            made.append(experiments.step)
            experiments["draft", "some"].begin(price)
            experiments["draft", "some"].end(experiments.step, again)
    return made


@pytest.mark.parametrize("price", [0.0, 0.3, 2.0])
def test_experiments_take_their_share_of_the_time(price: float) -> None:
    steps = 50_000
    made = run(Experiments(), steps, price)
    assert made[:3] == [
        FIRST_WAIT,
        2 * FIRST_WAIT,
        2 * FIRST_WAIT + max(FIRST_WAIT, min(2 * FIRST_WAIT, int(price / BUDGET))),
    ]
    waits = {later - earlier for earlier, later in pairwise(made[20:])}
    assert waits == {max(FIRST_WAIT, int(price / BUDGET))}
    assert len(made) * price <= 1.2 * BUDGET * steps


def test_one_that_promises_something_is_repeated_and_paid() -> None:
    made = run(Experiments(), 100_000, 1.0, again=True)
    assert made[: MOST_REPEATS + 1] == [FIRST_WAIT + place for place in range(4)]
    assert len(made) * 1.0 <= 1.2 * BUDGET * 100_000


def test_what_is_done_anyway_is_soon_tried_again_once_it_is_not() -> None:
    experiments = Experiments()
    run(experiments, 5000, 1.0)
    experiments["draft", "some"].restart(experiments.step)
    assert experiments.left("draft", "some") == FIRST_WAIT


def test_names_do_not_wait_for_one_another() -> None:
    experiments = Experiments()
    run(experiments, FIRST_WAIT, 1.0)
    assert [experiments.left("draft", name) for name in ("some", "other")] == [FIRST_WAIT, 0]
