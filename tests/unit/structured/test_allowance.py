"""Clients whose forms are slow lose these forms; others lose nothing."""

from __future__ import annotations

import pytest

from speculant.structured.lanes import CLIENT_SHARE, FREE_S, REFUSED_S, SLOW_S, SPARE_S, Allowance, ClientTime


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
    assert spent <= 2 * SPARE_S + 2 * seconds, "its last call, and one that was excused"
    assert "50 ms of processor time" in str(form.refusal)
    assert "Fix: simplify it" in str(form.refusal)


@pytest.mark.parametrize("seconds", [1.01 * SPARE_S, 0.3, 30.0])
@pytest.mark.parametrize("before", [0, 7])
def test_one_call_of_a_client_is_excused(seconds: float, before: int) -> None:
    """The machine may have stopped during it; then neither the form nor the client's other forms are concerned."""
    clock = Clock()
    client = ClientTime(clock)
    form, other = allowance(client, clock), allowance(client, clock)
    for _ in range(before):
        form.spend(5 * SLOW_S)
    form.spend(seconds)
    assert form.refusal is None
    assert not client.is_over
    other.spend(10 * SLOW_S)
    form.spend(FREE_S)
    assert form.refusal is other.refusal is None


def test_the_longest_call_is_excused() -> None:
    """Not the one after it, with which the spare time ends."""
    client = ClientTime(Clock())
    form = allowance(client)
    form.spend(0.9 * SPARE_S)
    for _ in range(8):
        form.spend(5 * SLOW_S)
        assert form.refusal is None
    for _ in range(4):
        form.spend(5 * SLOW_S)
    assert form.refusal is not None


def test_a_second_call_is_not_excused_soon() -> None:
    """Whichever form of the client has it. Another client has an excuse of its own, and time brings a new one."""
    clock = Clock()
    client = ClientTime(clock)
    first, second, third = (allowance(client, clock) for _ in range(3))
    first.spend(0.1)
    clock.now = REFUSED_S - 1
    second.spend(0.1)
    assert first.refusal is None
    assert second.refusal is not None
    clock.now = REFUSED_S + 1
    third.spend(0.1)
    assert third.refusal is None
    third.spend(0.1)
    assert third.refusal is not None
    stranger = allowance(ClientTime(clock), clock)
    stranger.spend(0.1)
    assert stranger.refusal is None


def test_only_one_call_is_excused_not_many() -> None:
    """A form whose calls are all slow has the time of one of them more."""
    form, calls = allowance(), 0
    while form.refusal is None:
        form.spend(0.02)
        calls += 1
    assert calls == 4, "three take more than the spare time"


def test_a_refusal_ends() -> None:
    clock = Clock()
    form = allowance(ClientTime(clock), clock)
    form.spend(1.0)
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
