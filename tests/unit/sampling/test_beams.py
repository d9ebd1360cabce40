"""A beam search as a value: rounds, ties, ends."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from speculant.beams import Beams, Continuations, common_prefix, texts_after, tree_of
from speculant.types import DraftTree
from tests.beams import Text, hypotheses, scored, text_of, texts_of


def beams(
    width: int = 2, penalty: float = 1.0, ends: tuple[int, ...] = (0,), longest: int = 9, **rest: object
) -> Beams:
    return Beams(width, penalty, frozenset(ends), longest, 50, **rest)  # type: ignore[arg-type]


def advanced(search: Beams, known: Mapping[Text, Continuations]) -> Beams:
    return search.advance(scored(search, known))


def test_a_search_begins_with_nothing() -> None:
    search = beams()
    assert (search.rounds, texts_of(search.unscored), search.trunk.tokens(), search.together) == (0, [()], [], True)


def test_a_round_waits_until_every_live_hypothesis_is_scored() -> None:
    search = advanced(beams(), {(): ((1, -1.0), (2, -2.0))})
    assert (texts_of(search.live), search.rounds, search.scored) == ([(1,), (2,)], 1, {})
    waiting = advanced(search, {(2,): ((1, -0.5),), (7,): ((1, -0.5),)})
    assert (waiting.live, waiting.rounds, texts_of(waiting.unscored)) == (search.live, 1, [(1,)])
    assert texts_of(waiting.scored) == [(2,)], "what is none of its hypotheses is forgotten"
    after = advanced(waiting, {(1,): ((1, -3.0),)})
    assert (texts_of(after.live), after.rounds) == ([(2, 1), (1, 1)], 2)


def test_rounds_continue_while_all_continuations_are_known() -> None:
    known: dict[Text, Continuations] = {
        (): ((1, -1.0), (2, -2.0)),
        (1,): ((1, -1.0), (2, -1.5)),
        (2,): ((1, -5.0),),
        (1, 1): ((3, -1.0),),
    }
    search = advanced(beams(), known)
    assert (search.rounds, texts_of(search.live)) == (2, [(1, 1), (1, 2)])
    assert (texts_of(search.unscored), text_of(search.trunk)) == ([(1, 2)], (1,))


def test_ties_go_to_the_better_hypothesis_then_continuation() -> None:
    search = advanced(beams(3), {(): ((5, -1.0), (4, -1.0), (3, -1.0), (2, -1.0))})
    assert texts_of(search.live) == [(5,), (4,), (3,)]
    same: Continuations = ((9, -2.0), (8, -2.0))
    assert texts_of(advanced(search, dict.fromkeys([(5,), (4,), (3,)], same)).live) == [(5, 9), (5, 8), (4, 9)]


def test_only_the_first_ranks_may_end() -> None:
    """The end ranks third of two: no hypothesis ends, and this one does not stay live."""
    search = advanced(beams(2), {(): ((1, -1.0), (2, -2.0), (0, -2.5), (3, -3.0))})
    assert (texts_of(search.live), search.finished) == ([(1,), (2,)], ())
    search = advanced(beams(2), {(): ((1, -1.0), (0, -2.0), (2, -2.5), (3, -3.0))})
    assert (texts_of(search.live), texts_of(search.finished)) == ([(1,), (2,)], [(0,)])


@pytest.mark.parametrize(("best", "goes_on"), [(-1.9, True), (-2.0, False), (-2.1, False)])
def test_a_search_ends_when_no_live_one_beats_the_worst_ended(best: float, goes_on: bool) -> None:
    """The two that ended have scores of -0.5 and -1; the one alive has two tokens."""
    *ended, alive = hypotheses({(0,): -0.5, (1, 0): -2.0, (2,): -1.0})
    search = beams(2, live=(alive,), rounds=1, finished=tuple(ended))
    after = advanced(search, {(2,): ((1, best + 1.0),)})
    assert (texts_of(after.live) == [(2, 1)], after.finished) == (goes_on, tuple(ended))


def test_the_last_place_ends_everybody() -> None:
    search = advanced(beams(2, longest=1), {(): ((1, -1.0), (2, -2.0), (3, -3.0))})
    assert (search.live, texts_of(search.finished)) == ((), [(1,), (2,)])


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (0,)), (1.0, (1, 2, 0))])
def test_a_length_penalty_favours_long_texts(penalty: float, best: Text) -> None:
    short, long = hypotheses({(0,): -1.0, (1, 2, 0): -1.5})
    assert text_of(max((short, long), key=lambda each: each.score(penalty))) == best


@pytest.mark.parametrize(
    ("reach", "trunk", "together"),
    [(9, (1, 1), True), (2, (1, 1), True), (1, (1, 1, 2), False), (0, (1, 1, 2, 3), False)],
)
def test_the_trunk_leaves_no_more_than_a_pass_can_hold(reach: int, trunk: Text, together: bool) -> None:
    live = hypotheses([(1, 1, 2, 3), (1, 1, 3, 3), (1, 1, 2, 4)])
    search = Beams(3, 1.0, frozenset(), 9, reach, 4, live)
    assert (text_of(search.trunk), search.together) == (trunk, together)


TEXTS = [(1, 2, 3), (1, 2, 4), (5,), (1, 6, 3)]


def test_a_common_prefix_of_hypotheses_is_one_node() -> None:
    tips = hypotheses(TEXTS)
    nodes = texts_after(tips[0].prefix(0), tips)
    assert texts_of(nodes) == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (5,), (1, 6), (1, 6, 3)]
    tree = tree_of(nodes)
    assert [tuple(tree.tokens_to(node)) for node in range(tree.size)] == texts_of(nodes)


@pytest.mark.parametrize(
    ("most", "expected"), [(7, TEXTS), (6, TEXTS[:3]), (4, TEXTS[:2]), (3, TEXTS[:1]), (2, TEXTS[2:3]), (0, [])]
)
def test_hypotheses_that_do_not_fit_are_left_out(most: int, expected: list[Text]) -> None:
    tips = hypotheses(TEXTS)
    found = texts_after(tips[0].prefix(0), tips, most)
    assert len(found) <= most
    assert [text for text in TEXTS if text in texts_of(found)] == expected


def test_hypotheses_beside_the_trunk_are_left_out() -> None:
    tips = hypotheses(TEXTS)
    assert texts_of(texts_after(tips[0].prefix(1), tips)) == [(1, 2), (1, 2, 3), (1, 2, 4), (1, 6), (1, 6, 3)]
    assert texts_of(texts_after(tips[2], tips)) == []


@pytest.mark.parametrize(("count", "prefix"), [(1, (1, 2, 3)), (2, (1, 2)), (3, ()), (4, ())])
def test_a_common_prefix_is_the_longest(count: int, prefix: Text) -> None:
    tips = hypotheses(TEXTS)
    assert text_of(common_prefix(tips[:count])) == prefix
    assert common_prefix((tips[0], tips[0].prefix(1))) is tips[0].prefix(1)


def test_a_tree_scores_the_hypotheses_that_it_has() -> None:
    """Nodes after a hypothesis score its continuations. Nodes of other texts are ignored."""
    live = hypotheses([(1, 2), (1, 3), (4, 2)])
    search = beams(3, live=live, rounds=2)
    tree = DraftTree.of([9, 1, 3, 2, 7, 7], [-1, -1, 1, 1, 3, 0])
    known = search.scored_by(tree, {node: ((10 + node, -1.0),) for node in range(-1, tree.size)})
    assert list(known) == [live[0], live[1]]
    assert [known[each].continuations for each in live[:2]] == [((13, -1.0),), ((12, -1.0),)]
    assert {token: each.continuations for token, each in known[live[0]].longer.items()} == {7: ((14, -1.0),)}
    assert not known[live[1]].longer
