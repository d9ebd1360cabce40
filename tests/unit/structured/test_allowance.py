"""Clients whose forms are slow lose these forms; others lose nothing."""

from __future__ import annotations

import pytest

from speculant.structured.allowance import CLIENT_SHARE, FREE_S, REFUSED_S, SLOW_S, SPARE_S, Allowance, ClientTime


class Clock:
    """Stands still unless a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def allowance(client: ClientTime | None = None, clock: Clock | None = None) -> Allowance:
    return Allowance(client or ClientTime(Clock()), clock or Clock())


def test_short_calls_are_free() -> None:
    form = allowance()
    for _ in range(100_000):
        form.spend(FREE_S)
    assert form.refusal is None


def test_a_few_long_calls_are_spare() -> None:
    """The first masks of a form take longer than the later ones."""
    clock = Clock()
    form = allowance(ClientTime(clock))
    for _ in range(3):
        clock.now += 10
        for _ in range(9):
            form.spend(SPARE_S / 10)
        for _ in range(200):
            form.spend(0.0)
    assert form.refusal is None


@pytest.mark.parametrize("seconds", [2 * FREE_S, 0.02, 1.0])
def test_a_slow_form_is_refused(seconds: float) -> None:
    form, spent = allowance(), 0.0
    while form.refusal is None:
        form.spend(seconds)
        spent += seconds
    assert spent <= 2 * SPARE_S + seconds
    assert "50 ms of processor time" in str(form.refusal)
    assert "Fix: simplify it" in str(form.refusal)


def test_a_refusal_ends() -> None:
    clock = Clock()
    form = allowance(ClientTime(clock), clock)
    form.spend(1.0)
    clock.now = REFUSED_S - 1
    assert form.refusal is not None
    clock.now = REFUSED_S + 1
    assert form.refusal is None
    form.spend(SPARE_S / 2)
    assert form.refusal is None


def test_a_client_with_many_slow_forms_has_little_for_each() -> None:
    """And it gets its share back with time; another client's forms are not concerned."""
    clock = Clock()
    slow, other = ClientTime(clock), ClientTime(clock)
    spent = 0.0
    for _ in range(100):
        form = allowance(slow)
        while form.refusal is None and spent < 10:
            form.spend(2 * SLOW_S)
            spent += 2 * SLOW_S
    assert spent < 100 * 1.5 * SPARE_S / 5 + 3 * SPARE_S
    modest = allowance(other)
    modest.spend(SPARE_S / 2)
    assert modest.refusal is None
    clock.now = spent / CLIENT_SHARE
    later = allowance(slow)
    later.spend(SPARE_S / 2)
    assert later.refusal is None
