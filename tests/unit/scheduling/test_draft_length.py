"""How many nodes a draft may have: the wanted length, cut to the nodes that can be used and fit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from speculant.beams import Beams
from speculant.drafting import DrafterNeeds
from speculant.engine import DraftBudget
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduled
from speculant.types import Request
from tests.beams import beams_of, give_search, hypotheses, scored
from tests.models import make_request


def decoding(num_output: int = 1, max_tokens: int | None = 100, wanted: int | None = None) -> Scheduled:
    """Schedule the newest token of a request with a prompt of five; wanted: its own draft length."""
    params = SamplingParams(max_tokens=max_tokens)
    request = make_request([1] * 5, [2] * num_output, params, num_tokens=wanted)
    return Scheduled(request, len(request.tokens) - 1, 1)


@dataclass
class Pool:
    """A plan for a cache whose free rows any sequence may take."""

    left: int

    def room(self, seq_id: int) -> int:
        return self.left

    def take(self, seq_id: int, n: int) -> bool:
        assert n >= 0
        fits = n <= self.left
        self.left -= n if fits else 0
        return fits


def limits_of(
    items: list[Scheduled],
    length: int = 4,
    budget: int = 100,
    memory: int = 100,
    max_nodes: int | None = None,
    max_len: int = 100,
    nodes_per_beam: int | None = None,
    most_nodes: int = 1000,
    look_ahead_rows: int = 0,
) -> list[int]:
    schedule = Schedule(items, Pool(memory), budget, [], [])
    needs = DrafterNeeds(max_nodes=max_nodes, nodes_per_beam=nodes_per_beam, target_inputs=look_ahead_rows)
    budget, lengths = DraftBudget(schedule, most_nodes), Fixed(length).choose(schedule)
    return [budget.take(item, length, needs, max_len) for item, length in zip(items, lengths, strict=True)]


@pytest.mark.parametrize(("wanted", "expected"), [(None, 4), (0, 0), (7, 7)])
def test_a_request_can_set_another_length(wanted: int | None, expected: int) -> None:
    assert limits_of([decoding(wanted=wanted)]) == [expected]


@pytest.mark.parametrize(("num_output", "expected"), [(1, 4), (5, 4), (6, 3), (7, 2), (8, 1), (9, 0)])
def test_a_draft_never_reaches_beyond_max_tokens(num_output: int, expected: int) -> None:
    assert limits_of([decoding(num_output, max_tokens=10)]) == [expected]


@pytest.mark.parametrize(("max_len", "expected"), [(20, 4), (11, 4), (10, 3), (9, 2), (8, 1), (7, 0), (6, 0)])
def test_a_draft_never_reaches_beyond_the_context(max_len: int, expected: int) -> None:
    """Of six tokens: a draft of n and one more token make n + 7 (docs/references.md, overflow guard)."""
    assert limits_of([decoding(1, max_tokens=None)], max_len=max_len) == [expected]


def test_a_drafter_s_own_limit_is_kept() -> None:
    assert limits_of([decoding()], max_nodes=2) == [2]
    assert limits_of([decoding()], max_nodes=9) == [4]


def test_all_drafts_of_a_step_are_bounded_together() -> None:
    assert limits_of([decoding(), decoding(), decoding()], most_nodes=6) == [4, 2, 0]


def test_the_step_s_budget_is_shared_in_order() -> None:
    assert limits_of([decoding(), decoding(wanted=0), decoding(), decoding()], budget=6) == [4, 0, 2, 0]
    assert limits_of([decoding(), decoding()], budget=0) == [0, 0]


def test_the_step_s_free_memory_is_shared_in_order() -> None:
    assert limits_of([decoding(), decoding(wanted=0), decoding(), decoding()], memory=6) == [4, 0, 2, 0]
    assert limits_of([decoding(), decoding()], memory=0) == [0, 0]


def test_an_unfinished_prompt_gets_no_draft() -> None:
    request: Request = make_request([1] * 5, params=SamplingParams(max_tokens=100))
    assert limits_of([Scheduled(request, 0, 3), Scheduled(request, 0, 5), Scheduled(request, 3, 2)]) == [0, 0, 0]
    assert limits_of([Scheduled(request, 4, 1)]) == [4]


@pytest.mark.parametrize(("room_for", "expected"), [(14, 4), (13, 3), (11, 3), (10, 2), (8, 2), (7, 1), (3, 1), (2, 0)])
def test_look_ahead_rows_take_room(room_for: int, expected: int) -> None:
    """A draft of n nodes takes n + (n + 1) min(n, 2) rows: 3, 8, 11 and 14."""
    assert limits_of([decoding()], look_ahead_rows=2, budget=room_for) == [expected]
    assert limits_of([decoding()], look_ahead_rows=2, memory=room_for) == [expected]
    assert limits_of([decoding()], look_ahead_rows=2, max_len=6 + room_for + 1) == [expected]


def test_look_ahead_rows_leave_less_for_other_drafts() -> None:
    assert limits_of([decoding(), decoding()], look_ahead_rows=2, budget=17) == [4, 1]
    assert limits_of([decoding(), decoding()], look_ahead_rows=2, memory=21) == [4, 1]
    assert limits_of([decoding(), decoding()], look_ahead_rows=2, memory=22) == [4, 2]


def searching(rounds: int = 3, max_tokens: int = 100) -> Scheduled:
    """Schedule a search of four beams, two of them alive after a prompt of five: six nodes."""
    request = make_request([1] * 5, params=SamplingParams(beam_width=4, max_tokens=max_tokens))
    live = hypotheses((token,) * rounds for token in range(2))
    search = give_search(request, Beams(4, 1.0, frozenset(), max_tokens, 50, rounds, live))
    return Scheduled(request, 4, 1, search.beams.waiting_tree())


def test_a_search_s_length_counts_rounds() -> None:
    assert limits_of([searching(), decoding()], nodes_per_beam=2) == [4 * 4 * 2, 4]
    assert limits_of([searching(), decoding()], nodes_per_beam=None) == [0, 4]
    assert limits_of([searching()], nodes_per_beam=2, max_nodes=3) == [32], "its own trees have nothing to do with it"


@pytest.mark.parametrize(("max_tokens", "rounds"), [(20, 4), (8, 4), (7, 3), (5, 1), (4, 0)])
def test_a_search_is_not_drafted_beyond_its_end(max_tokens: int, rounds: int) -> None:
    """Its hypotheses have three tokens: n rounds drafted, and one more, make n + 4."""
    assert limits_of([searching(3, max_tokens)], nodes_per_beam=1) == [4 * rounds]
    assert limits_of([searching(3)], nodes_per_beam=1, max_len=max_tokens + 5) == [4 * rounds]


def test_scored_hypotheses_are_computed_again_below_a_draft() -> None:
    """Then the limit is the rest of budget and memory for the draft itself."""
    item = searching()
    beams = beams_of(item.request)
    beams = beams.advance(scored(beams, {(0, 0, 0): ((1, -1.0),)}))
    give_search(item.request, beams)
    waiting = dataclasses.replace(item, tree=beams.waiting_tree())
    assert (waiting.tree.size, beams.live_tree.size) == (3, 6)
    assert limits_of([waiting, decoding()], nodes_per_beam=2, budget=13) == [10, 0]
    assert limits_of([waiting, decoding()], nodes_per_beam=2, memory=37) == [32, 2]
    assert limits_of([waiting, decoding()], nodes_per_beam=2, budget=3) == [0, 3]


def test_a_search_that_is_computed_in_parts_gets_no_draft() -> None:
    item = searching()
    assert limits_of([dataclasses.replace(item, tree=beams_of(item.request).waiting_tree(3))], nodes_per_beam=2) == [0]
    assert limits_of([dataclasses.replace(item, start=3, count=2)], nodes_per_beam=2) == [0]


@given(
    outputs=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    max_tokens=st.one_of(st.none(), st.integers(20, 30)),
    length=st.integers(0, 9),
    budget=st.integers(0, 30),
    memory=st.integers(0, 30),
    max_len=st.integers(6, 40),
    max_nodes=st.one_of(st.none(), st.integers(1, 6)),
)
def test_limits_hold_together(
    outputs: list[int],
    max_tokens: int | None,
    length: int,
    budget: int,
    memory: int,
    max_len: int,
    max_nodes: int | None,
) -> None:
    items = [decoding(num_output, max_tokens) for num_output in outputs]
    limits = limits_of(items, length, budget, memory, max_nodes, max_len)
    assert sum(limits) <= min(budget, memory)
    for item, limit in zip(items, limits, strict=True):
        assert 0 <= limit <= min(length, max_nodes or length)
        longest = len(item.request.tokens) + limit + 1
        assert limit == 0 or longest <= max_len
        assert limit == 0 or max_tokens is None or item.request.num_output + limit + 1 <= max_tokens
    if min(budget, memory) >= length * len(items) and max_nodes is None:
        for item, limit in zip(items, limits, strict=True):
            too_long = len(item.request.tokens) + limit + 2 > max_len
            too_many = max_tokens is not None and item.request.num_output + limit + 2 > max_tokens
            assert limit == length or too_long or too_many, "a longer draft would fit"
