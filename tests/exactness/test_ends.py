"""A request ends at its first stop: nothing after it is output, counted or kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from speculant.config import Limits
from speculant.drafting import Drafter
from speculant.lab.exactness import History, TableModel
from speculant.params import SamplingParams
from speculant.types import Request, StepOutput
from tests.fakes import (
    MakeCache,
    Rig,
    always_right,
    both_caches,
    build_rig,
    model_drafter,
    never_right,
    paged,
    sometimes_right,
)
from tests.figures import assert_figures, passes_of

V = 6
LENGTHS = (1, 2, 3, 5)
LIMITS = Limits(max_model_len=32, max_num_seqs=2, max_num_batched_tokens=64)


def counting(history: History) -> list[float]:
    """Most likely continue 0 1 2 3 4 5 0 1 ..."""
    return [6.0 if token == (history[-1] + 1) % V else 0.0 for token in range(V)]


def count_on(request: Request) -> list[int]:
    """Return the text of a greedy request over `counting`, without its end."""
    return [(request.prompt[-1] + 1 + place) % V for place in range(40)]


DRAFTERS: dict[str, Callable[[Limits, MakeCache], Drafter | None]] = {
    "none": lambda limits, cache: None,
    "right": lambda limits, cache: always_right(count_on),
    "wrong": lambda limits, cache: never_right(count_on, V),
    "sometimes": lambda limits, cache: sometimes_right(count_on, V),
    "model": lambda limits, cache: model_drafter(TableModel(counting, V), V, limits=limits, cache=cache),
}


def counting_rig(
    drafter: str = "right",
    length: int = 5,
    limits: Limits = LIMITS,
    ends: tuple[int, ...] = (),
    verifier: str = "auto",
    cache: MakeCache = paged,
) -> Rig:
    """Make an engine that counts."""
    made, target = DRAFTERS[drafter](limits, cache), TableModel(counting, V, limits.max_model_len)
    return build_rig(
        target, made, length=length, limits=limits, ends=frozenset(ends), verification=verifier, cache=cache
    )


def finished(rig: Rig, prompt: tuple[int, ...] = (0,), **params: object) -> tuple[Request, list[StepOutput]]:
    """Run one greedy request to its end; its step outputs are its text."""
    settings = SamplingParams(**{"temperature": 0, "max_tokens": 20, "logprobs": 0, **params})
    (request,) = rig.add(prompt, settings)
    outputs = rig.finish()
    assert [output.token for output in outputs] == request.output
    assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [request.ending.reason]
    assert [list(entry) for entry in request.logprobs] == [[token] for token in request.output]
    assert_figures(request.metrics, passes_of(outputs))
    assert rig.engine.metrics.tokens_per_pass == request.metrics.tokens_per_pass
    return request, outputs


everywhere = pytest.mark.parametrize(
    ("drafter", "length"), [(name, length) for name in DRAFTERS for length in LENGTHS if name != "none" or length == 1]
)


@both_caches
@everywhere
@pytest.mark.parametrize("verifier", ["auto", "rejection"])
def test_an_end_token_within_a_draft_ends_the_request(
    drafter: str, length: int, verifier: str, cache: MakeCache
) -> None:
    request, _ = finished(counting_rig(drafter, length, ends=(4,), verifier=verifier, cache=cache))
    assert request.output == [1, 2, 3, 4]
    assert (request.ending.reason, request.ending.stop) == ("stop", None), "it is the model's own end token"


@pytest.mark.parametrize("end", range(1, 6))
def test_a_draft_counts_up_to_its_end_token(end: int) -> None:
    """The pass over the prompt gives 0. The draft 1 2 3 4 5 is right, and the request ends within it.

    The token that would follow the draft was never given, so it is in no figure but vLLM's mean acceptance length.
    """
    request, _ = finished(counting_rig("right", 5, ends=(end,)), prompt=(4, 5))
    drafts = request.metrics.speculative_decoding
    assert (request.output, request.metrics.timing.sampled_passes) == (list(range(end + 1)), 2)
    assert request.metrics.tokens_per_pass == (end + 1) / 2
    assert drafts.num_accepted_draft_tokens == drafts.num_tested_tokens == end
    assert drafts.acceptance_rate == 1, "what the verifier accepted after the end is neither accepted nor tested"
    assert drafts.mean_acceptance_length == end + 1


@everywhere
def test_max_tokens_is_met_exactly(drafter: str, length: int) -> None:
    for limit in range(1, 8):
        request, _ = finished(counting_rig(drafter, length), max_tokens=limit)
        assert request.output == count_on(request)[:limit]
        assert (request.ending.reason, request.ending.stop) == ("length", None)


@pytest.mark.parametrize("length", LENGTHS)
def test_no_draft_is_longer_than_the_rest_of_the_text(length: int) -> None:
    """A drafter that is always right has every token fed once, and the last one never."""
    for limit in range(1, 10):
        target = TableModel(counting, V)
        rig = build_rig(target, always_right(count_on), length=length, limits=LIMITS)
        request, _ = finished(rig, max_tokens=limit)
        assert sum(target.num_rows) == len(request.tokens) - 1
        statistics = request.metrics.speculative_decoding
        assert statistics.num_accepted_draft_tokens == statistics.num_draft_tokens


@pytest.mark.covering(1)
@both_caches
@everywhere
def test_the_context_is_filled_and_never_overflows(drafter: str, length: int, cache: MakeCache) -> None:
    for longest in range(4, 11):
        rig = counting_rig(drafter, length, Limits(longest, 2, 64), cache=cache)
        request, _ = finished(rig, prompt=(3, 4, 5), max_tokens=None)
        assert len(request.tokens) == longest
        assert request.output == count_on(request)[: longest - 3]
        assert request.ending.reason == "length"


@pytest.mark.parametrize("positions", [2, 4, 6, 9])
def test_a_draft_model_with_a_shorter_context(positions: int) -> None:
    drafter = model_drafter(TableModel(counting, V, max_positions=positions), V, limits=LIMITS)
    request, _ = finished(build_rig(TableModel(counting, V), drafter, length=3, limits=LIMITS), max_tokens=15)
    assert request.output == count_on(request)[:15]


@everywhere
def test_stop_token_ids_and_ignore_eos(drafter: str, length: int) -> None:
    rig = counting_rig(drafter, length, ends=(2,))
    request, _ = finished(rig, ignore_eos=True, stop_token_ids=[5])
    assert request.output == [1, 2, 3, 4, 5]
    assert request.ending.stop == 5


@everywhere
def test_the_model_s_own_end_token_is_never_a_stop_reason(drafter: str, length: int) -> None:
    request, _ = finished(counting_rig(drafter, length, ends=(2,)), stop_token_ids=[2, 5])
    assert (request.output, request.ending.reason, request.ending.stop) == ([1, 2], "stop", None)


@everywhere
def test_an_end_token_wins_over_the_length(drafter: str, length: int) -> None:
    at_once, _ = finished(counting_rig(drafter, length, ends=(4,)), max_tokens=4)
    assert (at_once.output, at_once.ending.reason) == ([1, 2, 3, 4], "stop")
    behind, _ = finished(counting_rig(drafter, length, ends=(4,)), max_tokens=3)
    assert (behind.output, behind.ending.reason, behind.ending.stop) == ([1, 2, 3], "length", None)
    at_the_context_end, _ = finished(counting_rig(drafter, length, Limits(5, 2, 64), ends=(4,)))
    assert (at_the_context_end.output, at_the_context_end.ending.reason) == ([1, 2, 3, 4], "stop")


@everywhere
def test_min_tokens_delays_the_end(drafter: str, length: int) -> None:
    rig = counting_rig(drafter, length, ends=(4,))
    request, _ = finished(rig, min_tokens=6)
    assert 4 not in request.output[:5]  # the distribution has no end token there
    assert request.output[-1] == 4
    assert request.num_output >= 6


@dataclass
class StopAfter:
    """A stop string of tokens."""

    stop: list[int]
    seen: list[int] = field(default_factory=list)
    saved: int = 0

    def push(self, token: int) -> str | None:
        """See `StopChecker.push`."""
        self.seen.append(token)
        return "found" if self.seen[-len(self.stop) :] == self.stop else None

    def push_end(self, token: int) -> None:
        """See `StopChecker.push_end`."""
        self.seen.append(token)

    def checkpoint(self) -> None:
        """See `StopChecker.checkpoint`."""
        self.saved = len(self.seen)

    def rollback(self) -> None:
        """See `StopChecker.rollback`."""
        del self.seen[self.saved :]


@everywhere
def test_a_stop_string_that_spans_tokens(drafter: str, length: int) -> None:
    stop_checker = StopAfter([2, 3])
    rig = counting_rig(drafter, length)
    (request,) = rig.add((0,), SamplingParams(temperature=0, max_tokens=20), stop_checker=lambda: stop_checker)
    rig.finish()
    assert request.output == stop_checker.seen == [1, 2, 3]  # nothing behind the stop was even looked at
    assert (request.ending.reason, request.ending.stop) == ("stop", "found")


@everywhere
def test_a_stop_string_below_min_tokens_does_not_count(drafter: str, length: int) -> None:
    rig = counting_rig(drafter, length)
    settings = SamplingParams(temperature=0, max_tokens=20, min_tokens=4)
    (request,) = rig.add((0,), settings, stop_checker=lambda: StopAfter([2, 3]))
    rig.finish()
    assert request.output == [1, 2, 3, 4, 5, 0, 1, 2, 3]


def test_an_end_leaves_the_neighbour_alone() -> None:
    rig = counting_rig("right", 3, ends=(4,))
    (short,) = rig.add((0,), SamplingParams(temperature=0), "short")
    (long,) = rig.add((4,), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), "long")
    rig.finish()
    assert short.output == [1, 2, 3, 4]
    assert long.output == count_on(long)[:12]
