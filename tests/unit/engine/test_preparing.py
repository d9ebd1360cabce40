"""Prompts are read ahead only while nothing else is to be done, and take no memory that others use."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from speculant.cache import PART
from speculant.config import Limits
from speculant.engine import Engine
from speculant.errors import RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.scheduling import STEP_S, Preparation
from speculant.types import Client, Sender
from tests.fakes import BLOCK, Rig, build_rig, few_blocks, slotted

V = 4
PAIR = Pair(9, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=64, max_num_seqs=3, max_num_batched_tokens=32)
GREEDY = SamplingParams(temperature=0, max_tokens=4)
ONE, TWO = Sender(Client("one")), Sender(Client("two"))


def text(number: int, length: int = 32) -> list[int]:
    """Return a text; others have another first block."""
    return [number % V, number // V % V, number // V**2 % V, 0, *(place * place % V for place in range(length - 4))]


def rig_of(blocks: int = 64, target: TableModel | None = None) -> Rig:
    return build_rig(target or TableModel(PAIR.target, V), limits=LIMITS, cache=few_blocks(blocks))


def run_all(rig: Rig) -> None:
    while rig.engine.prepares:
        rig.step()


def cached(rig: Rig, prompt: list[int]) -> int:
    """Return how much of a prompt a request finds."""
    (request,) = rig.add(prompt, GREEDY)
    rig.finish()
    return request.metrics.cached_tokens


def result(preparation: Preparation) -> int:
    return preparation.done.result(0)


def test_only_the_rows_that_are_missing_are_computed() -> None:
    target = TableModel(PAIR.target, V)
    rig = rig_of(target=target)
    cached(rig, text(0, 16))
    target.num_rows.clear()
    made = rig.engine.prepare(text(0, 31))
    assert (made.num_tokens, made.cached) == (31, 16)
    run_all(rig)
    assert result(made) == 28
    assert sum(target.num_rows) == 12
    again = rig.engine.prepare(text(0, 31))
    assert (again.cached, result(again), rig.engine.prepares) == (28, 28, False)


def test_nothing_is_prepared_while_a_request_waits_or_runs() -> None:
    target = TableModel(PAIR.target, V)
    rig = rig_of(target=target)
    made = rig.engine.prepare(text(0))
    rig.add(text(1, 12), GREEDY)
    rig.finish()
    assert target.num_rows == [12, 1, 1, 1]
    assert not made.done.done()
    run_all(rig)
    assert result(made) == 32


@pytest.mark.parametrize(
    ("row_s", "expected"),
    [
        (0.0, [1, 2, 1, 4, 8, 16]),
        (0.005, [1, 2, 1, 4, *[8] * 3]),
        (0.01, [1, 2, 1, *[4] * 7]),
        (0.02, [1, 2, 1, *[2] * 14]),
        (0.25, [1, 2, 1, *[2] * 14]),
    ],
)
def test_a_part_takes_a_step_of_work_or_twice_the_least(
    monkeypatch: pytest.MonkeyPatch, row_s: float, expected: list[int]
) -> None:
    target = TableModel(PAIR.target, V)
    rig = rig_of(target=target)
    monkeypatch.setattr("speculant.engine.engine.time.perf_counter", lambda: sum(target.num_rows) * row_s)
    rig.engine.prepare(text(0))
    run_all(rig)
    assert target.num_rows == expected, STEP_S


def test_parts_shrink_when_they_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableModel(PAIR.target, V)
    rig = rig_of(200, target)
    row_s = [1e-3]
    monkeypatch.setattr("speculant.engine.engine.time.perf_counter", lambda: sum(target.num_rows) * row_s[0])
    rig.engine.prepare(text(0, 60))
    run_all(rig)
    assert target.num_rows == [1, 2, 1, 4, 8, 16, 28]
    target.num_rows.clear()
    row_s[0] = 0.02
    rig.engine.prepare(text(1, 44))
    run_all(rig)
    assert target.num_rows == [32, *[2] * 6]


def test_the_oldest_prepared_blocks_go() -> None:
    rig = rig_of(blocks=40)
    for number in range(1, 6):
        rig.engine.prepare(text(number, 16))
        run_all(rig)
    prefixes = rig.engine._preparations.prefixes
    assert len(prefixes.waiting) <= 40 // PART
    assert [cached(rig, text(number, 16)) > 0 for number in range(1, 6)] == [False, False, False, True, True]


def test_a_long_preparation_stops_at_its_part_of_the_cache() -> None:
    rig = rig_of(blocks=24)
    made = rig.engine.prepare(text(1, 60))
    run_all(rig)
    assert result(made) == 24 // PART * BLOCK


def test_preparations_of_a_client_take_none_of_anothers() -> None:
    rig = rig_of(blocks=40)
    rig.engine.prepare(text(1, 16), ONE)
    run_all(rig)
    for number in range(2, 9):
        rig.engine.prepare(text(number, 16), TWO)
        run_all(rig)
    assert cached(rig, text(1, 16)) == 15


def test_wrong_preparations_evict_a_part_of_the_cache_at_most() -> None:
    """A full cache: wrong preparations, however many, evict no more than their part."""
    rig = rig_of(blocks=40)
    for number in range(1, 11):
        cached(rig, text(number, 16))  # 4 blocks each: the cache is full
    for number in range(11, 40):
        rig.engine.prepare(text(number, 16))
        run_all(rig)
    lost = sum(rig.cache.known_blocks(text(number, 16)) < 4 for number in range(1, 11))
    assert lost <= 40 // PART // 4 + 1


def test_two_that_evict_each_other_come_to_an_end() -> None:
    rig = rig_of(blocks=24)
    both = rig.engine.prepare(text(1, 60), ONE), rig.engine.prepare(text(2, 60), TWO)
    for _ in range(60):
        rig.step()
    assert not rig.engine.prepares
    assert sum(map(result, both)) > 0


def test_the_oldest_of_a_clients_preparations_gives_way() -> None:
    rig = rig_of(blocks=200)
    mine = [rig.engine.prepare(text(number), ONE) for number in range(9)]
    other = rig.engine.prepare(text(9), TWO)
    assert [each.done.done() for each in (*mine, other)] == [True, *[False] * 9]
    assert result(mine[0]) == 0
    while not rig.engine.metrics.prepared_tokens:
        rig.step()
    rig.step()
    assert cached(rig, text(9)) > 0, "clients do not take turns"


def test_preparations_can_be_dropped_and_prompts_forgotten() -> None:
    rig = rig_of()
    made = rig.engine.prepare(text(0))
    for _ in range(5):
        rig.step()
        assert rig.engine.reset_prefix_cache(), "something was kept"
        assert rig.cache.free_tokens() == 64 * BLOCK
    rig.engine.drop_preparations()
    assert not rig.engine.prepares
    assert result(made) == 0


def test_an_error_ends_the_preparation_alone() -> None:
    target = TableModel(PAIR.target, V)
    rig = rig_of(target=target)
    forward, broken = target.forward, ValueError("broken")

    def fail(*arguments: object) -> object:
        raise broken

    made, other = rig.engine.prepare(text(0), ONE), rig.engine.prepare(text(1), TWO)
    target.forward = fail  # type: ignore[method-assign, assignment]
    rig.step()
    target.forward = forward  # type: ignore[method-assign]
    run_all(rig)
    assert made.done.exception() is broken
    assert result(other) == 32


def test_a_request_finds_every_block_free_or_known() -> None:
    rig = rig_of()
    rig.engine.prepare(text(0))
    rig.step()
    assert rig.cache.free_tokens() == 63 * BLOCK, "the block that is being prepared"
    rig.add(text(1), GREEDY)
    assert rig.cache.free_tokens() == 64 * BLOCK
    rig.finish()
    run_all(rig)
    assert rig.cache.free_tokens() == 64 * BLOCK


def test_a_preparation_changes_no_random_number() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    outputs = []
    for prepares in (False, True):
        rig = rig_of()
        if prepares:
            rig.engine.prepare(text(0))
            run_all(rig)
        (request,) = rig.add(text(0), params)
        rig.finish()
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "prompt"), ([V], "token"), ([1] * 64, "max_model_len")],
    ids=["empty", "foreign", "long"],
)
def test_a_prompt_that_no_request_could_have_is_refused(prompt: list[int], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        rig_of().engine.prepare(prompt)


@pytest.mark.parametrize("steps", [1, 20])
def test_reading_from_the_disk_that_stands_still_ends(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """What comes further in each step goes on."""
    rig = rig_of()
    calls = list[float]()

    def fetch(tokens: Sequence[int], salt: str, seconds: float) -> bool:
        calls.append(seconds)
        return False

    monkeypatch.setattr(rig.cache, "fetch", fetch)
    monkeypatch.setattr(rig.cache, "known_blocks", lambda tokens, salt: min(len(calls), steps))
    made = rig.engine.prepare(text(0))
    for _ in range(steps + 20):
        rig.step()
    assert (result(made), rig.engine.prepares) == (0, False)
    assert steps < len(calls) < steps + 20


def test_without_prefixes_nothing_can_be_prepared() -> None:
    rig = build_rig(TableModel(PAIR.target, V), limits=LIMITS, cache=slotted)
    engine: Engine = rig.engine
    with pytest.raises(RequestError, match="prefix caching is off"):
        engine.prepare(text(0))
