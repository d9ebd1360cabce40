"""The time that settings add to a step: how it is measured, and how a step's budget of it is shared."""

from __future__ import annotations

import pytest

from speculant import types as module
from speculant.params import SamplingParams
from speculant.scheduling import ALONE_S, STEP_S, WorkBudget
from speculant.types import FIRST_S, NO_WORK, Client, StepWork, WorkRate
from tests.unit.scheduling.driver import Driver, counts, slots

PROMPT_LOGPROBS = SamplingParams(max_tokens=3, prompt_logprobs=5)
ATTACKER, NEIGHBOUR = Client("attacker"), Client("neighbour")


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


def costing(row_s: float) -> StepWork:
    return StepWork(WorkRate(row_s))


# --- measuring


def test_work_is_measured_once_where_uses_are_nested(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, work = Clock(monkeypatch), costing(0.0025)
    with work:
        clock.now += 0.0045
        with work:
            clock.now += 0.003
    clock.now += 7
    work.settle(rows=3)
    assert work.last_s == pytest.approx(0.0075)
    assert work.row_s == pytest.approx(0.0025), "as expected"
    work.settle(rows=1)
    assert work.last_s == 0
    assert work.row_s < 0.0025


def test_a_new_sequence_expects_the_time_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kind = Clock(monkeypatch), WorkRate()
    assert StepWork(kind).row_s == FIRST_S
    for _ in range(30):
        work = StepWork(kind)
        with work:
            clock.now += 0.01
        work.settle(rows=2)
    assert StepWork(kind).row_s == pytest.approx(0.005, rel=0.01)


def test_a_stopped_machine_does_not_make_work_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, work = Clock(monkeypatch), costing(0.0025)
    with work:
        clock.now += 60
    work.settle(rows=1)
    assert work.row_s < 0.0075


def test_settings_without_work_are_not_measured() -> None:
    with NO_WORK:
        pass
    NO_WORK.settle(rows=1)
    assert (NO_WORK.row_s, NO_WORK.last_s) == (0, 0)


# --- sharing


def test_clients_share_the_time_of_a_step_by_weight() -> None:
    budget, work = WorkBudget(STEP_S, {"one": 1.0, "two": 4.0}), costing(0.0025)
    assert budget.take("one", work, 100) == round(0.2 * STEP_S / 0.0025)
    assert budget.take("two", work, 100) == round(0.8 * STEP_S / 0.0025)
    assert budget.take("one", work, 1) == 0
    assert budget.take("one", NO_WORK, 7) == 7


def test_each_client_gets_the_work_of_one_sequence_in_any_case() -> None:
    budget, work = WorkBudget(STEP_S, {"one": 1.0}), costing(9.0)
    assert budget.take("one", work, 100, least=3) == 3
    assert budget.take("one", work, 100, least=3) == 0


@pytest.mark.parametrize("neighbour", [False, True])
def test_prompts_with_logprobs_share_a_pass(neighbour: bool) -> None:
    """Each of their rows is a log-probability of every token; 16 prompts once took 16 times as many rows as one."""
    driver = Driver(slots(20), max_num_seqs=20, budget=2000)
    for _ in range(16):
        driver.add(90, params=PROMPT_LOGPROBS, client=ATTACKER, work=costing(0.0025))
    other = driver.add(40, client=NEIGHBOUR) if neighbour else None
    rows = counts(driver.step())
    if other is not None:
        assert rows.pop(other.seq_id) == 40
    assert sum(rows.values()) == round((STEP_S if neighbour else ALONE_S) / 0.0025)
    driver.finish()
    assert all(request.num_output == 3 for request in driver.requests)


def test_sequences_whose_work_does_not_fit_take_turns() -> None:
    """100 forms with costly masks: a step has time for 20 of them."""
    driver = Driver(slots(101), max_num_seqs=101, budget=2000)
    forms = [driver.add(1, max_tokens=6, client=ATTACKER, work=costing(0.0025)) for _ in range(100)]
    other = driver.add(1, max_tokens=6, client=NEIGHBOUR)
    for step in range(1, 7):
        assert len(driver.step().items) == round(STEP_S / 0.0025) + 1
        assert other.num_output == step
        progress = {request.num_output for request in forms}
        assert max(progress) - min(progress) <= 1, "whoever waited goes first"


def test_costly_work_of_a_single_sequence_goes_on() -> None:
    driver = Driver(slots(3))
    costly = [driver.add(1, client=ATTACKER, work=costing(5.0)) for _ in range(2)]
    driver.add(1, client=NEIGHBOUR)
    driver.finish()
    assert all(request.num_output == 3 for request in costly)


def test_drafts_get_the_time_that_is_left() -> None:
    driver = Driver(slots(2))
    request = driver.add(1, client=ATTACKER, work=costing(0.01))
    driver.add(1, client=NEIGHBOUR)
    work = driver.step().work
    assert work is not None
    assert work.take("attacker", request.work, 512) == 4, "masks of 4 drafted positions beside one of the next token"
    assert work.take("attacker", request.work, 512) == 0
