"""A beam search as a value: rounds, ties, ends."""

from __future__ import annotations

import pytest

from speculant.beams import Beams, Continuations, Hypothesis, Text


def beams(
    width: int = 2, penalty: float = 1.0, ends: tuple[int, ...] = (0,), longest: int = 9, **rest: object
) -> Beams:
    return Beams(width, penalty, frozenset(ends), longest, 50, **rest)  # type: ignore[arg-type]


def texts(hypotheses: tuple[Hypothesis, ...]) -> list[Text]:
    return [each.tokens for each in hypotheses]


def test_a_search_begins_with_nothing() -> None:
    search = beams()
    assert (search.rounds, search.unscored, search.trunk, search.together) == (0, [()], (), True)


def test_a_round_waits_until_every_live_hypothesis_is_scored() -> None:
    search = beams().advance({(): ((1, -1.0), (2, -2.0))})
    assert (texts(search.live), search.rounds, search.scored) == ([(1,), (2,)], 1, {})
    waiting = search.advance({(2,): ((1, -0.5),), (7,): ((1, -0.5),)})
    assert (waiting.live, waiting.rounds, waiting.unscored) == (search.live, 1, [(1,)])
    assert list(waiting.scored) == [(2,)], "what is none of its hypotheses is forgotten"
    after = waiting.advance({(1,): ((1, -3.0),)})
    assert (texts(after.live), after.rounds) == ([(2, 1), (1, 1)], 2)


def test_rounds_go_on_as_long_as_everything_is_known() -> None:
    known: dict[Text, Continuations] = {
        (): ((1, -1.0), (2, -2.0)),
        (1,): ((1, -1.0), (2, -1.5)),
        (2,): ((1, -5.0),),
        (1, 1): ((3, -1.0),),
    }
    search = beams().advance(known)
    assert (search.rounds, texts(search.live)) == (2, [(1, 1), (1, 2)])
    assert (search.unscored, search.trunk) == ([(1, 2)], (1,))


def test_ties_go_to_the_better_hypothesis_then_to_its_better_continuation() -> None:
    search = beams(3).advance({(): ((5, -1.0), (4, -1.0), (3, -1.0), (2, -1.0))})
    assert texts(search.live) == [(5,), (4,), (3,)]
    same: Continuations = ((9, -2.0), (8, -2.0))
    assert texts(search.advance(dict.fromkeys([(5,), (4,), (3,)], same)).live) == [(5, 9), (5, 8), (4, 9)]


def test_only_the_first_ranks_may_end() -> None:
    """The end ranks third of two: nobody ends, and it does not live on."""
    search = beams(2).advance({(): ((1, -1.0), (2, -2.0), (0, -2.5), (3, -3.0))})
    assert (texts(search.live), search.finished) == ([(1,), (2,)], ())
    search = beams(2).advance({(): ((1, -1.0), (0, -2.0), (2, -2.5), (3, -3.0))})
    assert (texts(search.live), texts(search.finished)) == ([(1,), (2,)], [(0,)])


@pytest.mark.parametrize(("best", "goes_on"), [(-1.9, True), (-2.0, False), (-2.1, False)])
def test_it_is_over_when_nobody_alive_is_better_than_the_worst_that_ended(best: float, goes_on: bool) -> None:
    """The two that ended have scores of -0.5 and -1; the one alive has two tokens."""
    ended = (Hypothesis((0,), -0.5), Hypothesis((1, 0), -2.0))
    search = beams(2, live=(Hypothesis((2,), -1.0),), rounds=1, finished=ended)
    after = search.advance({(2,): ((1, best + 1.0),)})
    assert (texts(after.live) == [(2, 1)], after.finished) == (goes_on, ended)


def test_the_last_place_ends_everybody() -> None:
    search = beams(2, longest=1).advance({(): ((1, -1.0), (2, -2.0), (3, -3.0))})
    assert (search.live, texts(search.finished)) == ((), [(1,), (2,)])


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (0,)), (1.0, (1, 2, 0))])
def test_a_length_penalty_favours_long_texts(penalty: float, best: Text) -> None:
    short, long = Hypothesis((0,), -1.0), Hypothesis((1, 2, 0), -1.5)
    assert max((short, long), key=lambda each: each.score(penalty)).tokens == best


@pytest.mark.parametrize(
    ("reach", "trunk", "together"),
    [(9, (1, 1), True), (2, (1, 1), True), (1, (1, 1, 2), False), (0, (1, 1, 2, 3), False)],
)
def test_the_trunk_leaves_no_more_than_a_pass_can_hold(reach: int, trunk: Text, together: bool) -> None:
    live = tuple(Hypothesis(text, -1.0) for text in [(1, 1, 2, 3), (1, 1, 3, 3), (1, 1, 2, 4)])
    search = Beams(3, 1.0, frozenset(), 9, reach, 4, live)
    assert (search.trunk, search.together) == (trunk, together)
