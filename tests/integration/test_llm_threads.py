"""One `LLM` for several threads and many prompts: each gets its own results, and ended requests are freed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from speculant import LLM, SamplingParams
from speculant.engine import Generation
from speculant.types import StepOutput
from tests.models import EXACT_DTYPE, Checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONGEST_WAIT = 60.0  # seconds; only a deadlock takes as long


@pytest.fixture
def llm(checkpoints: Checkpoints) -> LLM:
    return LLM(checkpoints.target, dtype=EXACT_DTYPE, max_num_seqs=4, max_waiting=4, max_model_len=128)


def prompts_of(count: int, first: int = 40) -> list[list[int]]:
    return [[first + number % 30, 50, 51] for number in range(count)]


def on_step(llm: LLM, call: Callable[[], None]) -> None:
    """Have something called before every step of an engine, by the thread that steps."""
    step = llm.engine.step

    def noted() -> list[StepOutput]:
        call()
        return step()

    llm.engine.step = noted  # type: ignore[method-assign]


def test_a_step_does_not_slow_down_with_ended_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 100 prompts is checked for its end a few times, not in every step."""
    asked = 0
    finished = Generation.finished.fget  # type: ignore[attr-defined]

    def counted(generation: Generation) -> bool:
        nonlocal asked
        asked += 1
        return bool(finished(generation))

    monkeypatch.setattr(Generation, "finished", property(counted))
    llm.generate(prompts_of(100), GREEDY)
    assert llm.engine.metrics.steps >= 25
    assert asked <= 3 * 100


def test_ended_requests_are_freed_while_others_run(llm: LLM) -> None:
    made: list[weakref.ref[Any]] = []
    most = 0
    add = llm.engine.add_checked

    def noted(*arguments: Any, **named: Any) -> Any:
        samples = add(*arguments, **named)
        made.extend(map(weakref.ref, samples))
        return samples

    def count() -> None:
        nonlocal most
        most = max(most, sum(each() is not None for each in made))

    llm.engine.add_checked = noted  # type: ignore[method-assign]
    on_step(llm, count)
    llm.generate(prompts_of(60), GREEDY)
    assert len(made) == 60
    assert most <= 4 + 4 + 2, "max_num_seqs run, max_waiting wait, and one has just been yielded"


def test_threads_get_their_own_results(llm: LLM) -> None:
    lists = [prompts_of(10, first) for first in (40, 70, 100)]
    expected = [[each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)] for prompts in lists]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompts: llm.generate(prompts, GREEDY), lists, timeout=LONGEST_WAIT))
    assert [[each.outputs[0].token_ids for each in outputs] for outputs in found] == expected
    assert [each.prompt_token_ids for each in found[1]] == lists[1]
    assert not llm.engine.has_unfinished()


def test_a_stepping_thread_lets_other_threads_step(llm: LLM) -> None:
    """One thread runs long texts; a short one of another thread begins later and ends first."""
    begun, ends = threading.Event(), list[str]()
    on_step(llm, begun.set)

    def run(name: str, prompts: list[list[int]], length: int) -> None:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        ends.append(name)

    long = threading.Thread(target=run, args=("long", prompts_of(60), 60), daemon=True)
    long.start()
    assert begun.wait(LONGEST_WAIT)
    short = threading.Thread(target=run, args=("short", prompts_of(1), 2), daemon=True)
    short.start()
    for thread in (short, long):
        thread.join(LONGEST_WAIT)
    assert ends == ["short", "long"]


def test_streams_of_several_threads_get_their_own_pieces(llm: LLM) -> None:
    prompts = prompts_of(4)
    expected = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]

    def tokens(prompt: list[int]) -> list[int | None]:
        return [piece.token for piece in llm.stream(prompt, GREEDY)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokens, prompts, timeout=LONGEST_WAIT)) == expected


def test_samples_that_end_in_one_step_end_their_request_once(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(prompts_of(6), params)
    assert [len(each.outputs) for each in outputs] == [4] * 6


def test_undecodable_text_fails_its_own_reader(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that steps makes the pieces of all streams."""
    bad, good = llm.stream([40, 50], GREEDY), llm.stream([41, 50], GREEDY)
    next(bad), next(good)
    piece = Generation.piece

    def failing(generation: Generation, output: StepOutput) -> Any:
        if generation.request_id == "request-0":
            raise ValueError("no text")
        return piece(generation, output)

    monkeypatch.setattr(Generation, "piece", failing)
    assert len(list(good)) == 11
    with pytest.raises(ValueError, match="no text"):
        list(bad)
    assert not llm.engine.has_unfinished()


def test_stream_may_end_within_a_step(llm: LLM) -> None:
    """The garbage collector may end a dropped stream anywhere, in a thread that steps too: it must wait for no lock."""
    dropped: list[Iterator[Any]] = [llm.stream([40, 50], GREEDY)]
    next(dropped[0])

    def drop() -> None:
        for stream in dropped:
            stream.close()  # type: ignore[attr-defined]
        dropped.clear()

    on_step(llm, drop)
    ended = threading.Thread(target=llm.generate, args=([[41, 50]], GREEDY), daemon=True)
    ended.start()
    ended.join(LONGEST_WAIT)
    assert not ended.is_alive()
    assert not llm.engine.has_unfinished()
    assert llm.engine.metrics.aborted == 1
