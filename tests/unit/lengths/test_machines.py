"""The simulated machines, and the adaptive policy on all of them."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from speculant.lengths import Fixed, adaptive
from tests.unit.lengths.groups import LEAST_OVER_PLAIN, PolicyScore, judge, make_machines
from tests.unit.lengths.machines import FURTHER, PLAIN, FixedChoice, Machine, fixed_run
from tests.unit.lengths.simulated import CALL_S, CALL_SEQUENCE_S, context_of, run

# The goal is reached on every machine beside plain decoding, and beside the best fixed length on nearly all of them.
REACHED_REGRET, REACHED_MEDIAN, REACHING_GOALS = 0.1, 0.015, 0.9


@pytest.fixture(scope="module", params=[16, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def scores(request: pytest.FixtureRequest) -> list[PolicyScore]:
    return [judge(machine, adaptive.build) for machine in make_machines()[:: request.param]]


def test_adaptive_is_never_much_slower_than_plain(scores: list[PolicyScore]) -> None:
    assert [score for score in scores if score.over_plain < LEAST_OVER_PLAIN] == []


def test_adaptive_is_near_the_best_fixed_length(scores: list[PolicyScore]) -> None:
    assert [score for score in scores if score.regret > REACHED_REGRET] == []
    assert median(score.regret for score in scores) < REACHED_MEDIAN
    assert sum(score.reaches_goals for score in scores) >= REACHING_GOALS * len(scores)


def test_costs_that_were_measured_too_high_are_corrected() -> None:
    """Also where each trial of a draft begins with a prompt that the draft model reads."""
    (machine,) = (each for each in make_machines() if each.name == "errors (1.0, 5.0), token 0.15")
    assert judge(machine, adaptive.build).whole_regret < REACHED_REGRET


def test_machines_have_names_of_their_own() -> None:
    machines = make_machines()
    assert 100 <= len({(machine.group, machine.name) for machine in machines}) == len(machines)


EVERYTHING = Machine(
    "", "", "both", 4, cliffs=((9, 0.3),), key=1e-4, cache=0.8, drifts=(1.5, 0.5), switch=50, spread=0.1, request=48,
    tokens=200, rests=(1e-3, 2e-3, 3e-4, 4e-4),
)  # fmt: skip
ALONE = Machine("", "", alpha=0.6, decay=0.9, tokens=500, read=0.0)
LOOKUP = Machine("", "", "lookup", 2, tokens=300)


@pytest.mark.parametrize("length", [0, 1, 4, 16])
@pytest.mark.parametrize("machine", [EVERYTHING, ALONE, LOOKUP], ids=["both", "model", "lookup"])
def test_a_fixed_policy_takes_the_time_of_a_fixed_run(machine: Machine, length: int) -> None:
    """The two ways to a result are equal but for calls, and for tokens that the model missed while a lookup drafted."""
    choice = FixedChoice(length * (machine.method != "lookup"), length * (machine.method != "model"))
    driven, computed = run(machine, Fixed(length)), fixed_run(machine, choice)
    steps = len(driven.tokens)
    calls_s = (CALL_S + CALL_SEQUENCE_S * machine.sequences) * driven.calls
    assert np.array_equal(driven.tokens, computed.tokens[:steps])
    rel = 0.03 if machine.method == "both" else 1e-9
    assert driven.seconds[-1] - calls_s == pytest.approx(computed.seconds[steps - 1], rel=rel)


@pytest.mark.parametrize(("alpha", "length"), [(0.0, 4), (0.5, 3), (0.9, 8)])
def test_a_fixed_run_has_the_expected_speed(alpha: float, length: int) -> None:
    machine = Machine("", "", alpha=alpha, tokens=20_000, read=0.0)
    found = fixed_run(machine, FixedChoice(length))
    step_s = float(machine.passes[1 + length]) + machine.floor_s * (machine.fixed + machine.token * length)
    expected = sum(alpha**depth for depth in range(length + 1)) / (step_s + sum(machine.rests))
    assert found.tokens[-1] / found.seconds[-1] == pytest.approx(expected, rel=0.03)


def test_a_run_is_the_same_each_time() -> None:
    first, second = (run(EVERYTHING, adaptive.build(context_of(EVERYTHING))) for _ in range(2))
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.seconds, second.seconds)


def test_a_draft_slows_the_passes_after_it() -> None:
    machine = Machine("", "", cache=0.7, lingers=0.5, alpha=0.0, tokens=100)
    plain, drafted = fixed_run(machine, PLAIN), fixed_run(machine, FixedChoice(1))
    assert np.diff(plain.seconds)[-1] == pytest.approx(0.7 * machine.floor_s + 1.1e-4)
    assert np.diff(drafted.seconds)[-1] == pytest.approx((1.01 + 0.12) * machine.floor_s + 2.2e-4)


def test_a_policy_begins_with_wrong_costs() -> None:
    machine = Machine("", "", errors=(1.4, 0.7), cache=0.8, key=1e-4)
    costs = context_of(machine).costs()
    assert costs is not None
    assert costs.passes.at(8) == pytest.approx(1.4 * 0.8 * machine.passes[8])
    assert costs.draft_s("model", 1, 4) == pytest.approx(0.7 * 0.42 * machine.floor_s)
    assert costs.attention([1], [1000]).plain_s == pytest.approx(1.4 * 0.1 * machine.floor_s)
    assert costs.keys.further == pytest.approx(FURTHER * costs.keys.first)
