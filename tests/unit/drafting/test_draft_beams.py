"""A draft model's own beam search: its additions to the target's hypotheses, and its cache afterwards."""

from __future__ import annotations

import pytest

from speculant.config import Limits
from speculant.drafting.model.beams import draft_beams
from speculant.drafting.model.runner import DraftModelRunner
from speculant.lab.exactness.tables import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.sampling.chance import KeyedChances
from speculant.types import DraftTree, Request
from tests.beams import beams_of, give_search, scored, text_of
from tests.fakes import MakeCache, Rig, both_caches, build_rig, few_blocks, paged, stored_tokens

V, WIDTH = 6, 3
PAIR = Pair(4, V, FULL_SUPPORT)
PROMPT = (1, 0, 2)
LIMITS = Limits(60, 2, 128)


def search_after(rounds: int, longest: int = 30, ends: frozenset[int] = frozenset()) -> tuple[Rig, Request]:
    """Run a plain search for some rounds."""
    rig = build_rig(TableModel(PAIR.target, V), limits=LIMITS, ends=ends)
    (request,) = rig.add(PROMPT, SamplingParams(beam_width=WIDTH, max_tokens=longest))
    for _ in range(rounds):
        rig.step()
    return rig, request


def follower_of(model: TableModel, cache: MakeCache = paged, budget: int = 128) -> DraftModelRunner:
    return DraftModelRunner(model, cache(model.cache_shape, LIMITS), KeyedChances(), budget)


def texts_of(request: Request, tree: DraftTree) -> set[tuple[int, ...]]:
    """Return all texts that a tree has after the prompt."""
    return {(*request.output, *tree.tokens_to(node)) for node in range(tree.size)}


def assert_keeps_up(runner: DraftModelRunner, request: Request) -> None:
    """Its cache holds the trunk and nothing of the tree."""
    runner.cache.check()
    assert stored_tokens(runner.cache, request.seq_id) == request.tokens


@both_caches
@pytest.mark.parametrize("rounds", [1, 2, 5, 9])
def test_a_model_equal_to_the_target_drafts_its_beams(cache: MakeCache, rounds: int) -> None:
    """Of as many beams as the target's, at the target's scores, in rounds that end with the limit."""
    rig, request = search_after(rounds)
    runner = follower_of(TableModel(PAIR.target, V), cache)
    runner.begin(request)
    live = beams_of(request).live_tree
    tree = draft_beams(runner, [(request, 4 * WIDTH)], 1, V)[request.seq_id]
    drafted = texts_of(request, tree) - texts_of(request, live)
    assert len(drafted) == 4 * WIDTH
    assert_keeps_up(runner, request)
    for _ in range(4):
        rig.step()
        kept = {text_of(each) for each in beams_of(request).live}
        assert kept <= drafted
        drafted -= kept
    assert not drafted


@pytest.mark.parametrize("limit", range(1, 13))
def test_a_limit_may_end_within_a_round(limit: int) -> None:
    """Then the round's best are drafted."""
    _, request = search_after(3)
    runner = follower_of(TableModel(PAIR.draft, V))
    runner.begin(request)
    whole = draft_beams(runner, [(request, 12)], 2, V)[request.seq_id]
    tree = draft_beams(runner, [(request, limit)], 2, V)[request.seq_id]
    assert tree.token_list == whole.token_list[: tree.size]
    assert tree.size == beams_of(request).live_tree.size + limit
    assert_keeps_up(runner, request)


def test_a_backlog_is_caught_up_first() -> None:
    _, request = search_after(8)
    runner = follower_of(TableModel(PAIR.draft, V), budget=2)
    runner.begin(request)
    rounds = 0
    while not (drafts := draft_beams(runner, [(request, 6)], 2, V)):
        rounds += 1
        assert stored_tokens(runner.cache, request.seq_id) == request.tokens[: 2 * rounds]
    assert rounds == (len(request.tokens) - 1) // 2
    fresh = follower_of(TableModel(PAIR.draft, V))
    fresh.begin(request)
    expected = draft_beams(fresh, [(request, 6)], 2, V)[request.seq_id]
    assert drafts[request.seq_id].token_list == expected.token_list


@pytest.mark.parametrize("blocks", range(1, 9))
def test_nodes_without_room_are_not_drafted(blocks: int) -> None:
    _, request = search_after(6)
    draft = TableModel(PAIR.draft, V)
    runner = follower_of(draft, few_blocks(blocks))
    runner.begin(request)
    tree = draft_beams(runner, [(request, 18)], 2, V).get(request.seq_id, DraftTree.empty())
    runner.cache.check()
    needed = len(request.tokens) + beams_of(request).live_tree.size
    assert (tree.size > beams_of(request).live_tree.size) == (4 * blocks >= needed)
    assert tree.size <= max(0, 4 * blocks - len(request.tokens) + 1)


def test_the_target_s_scores_are_taken_over() -> None:
    """The draft's own distribution does not matter where the target's is known."""
    _, request = search_after(3)
    beams = beams_of(request)
    best = text_of(beams.live[0])
    give_search(request, beams.advance(scored(beams, {best: ((5, -0.001), (4, -9.0))})))
    runner = follower_of(TableModel(lambda history: [0.0] * V, V))
    runner.begin(request)
    tree = draft_beams(runner, [(request, 6)], 2, V)[request.seq_id]
    drafted = texts_of(request, tree) - texts_of(request, beams_of(request).live_tree)
    assert {text for text in drafted if text[:-1] == best} <= {(*best, 5), (*best, 4)}
    assert (*best, 5) in drafted


def test_nothing_is_drafted_after_an_end() -> None:
    ends = frozenset({0, 3})
    _, request = search_after(3, ends=ends)
    runner = follower_of(TableModel(PAIR.target, V))
    runner.begin(request)
    tree = draft_beams(runner, [(request, 40)], 2, V)[request.seq_id]
    assert tree.size > beams_of(request).live_tree.size
    assert ends.isdisjoint(tree.token_list)


def test_a_smaller_vocabulary_drafts_its_own_tokens() -> None:
    _, request = search_after(5)
    runner = follower_of(TableModel(lambda history: [1.0, 2.0, 0.0], 3))
    runner.begin(request)
    tree = draft_beams(runner, [(request, 12)], 2, V)[request.seq_id]
    assert tree.size == beams_of(request).live_tree.size + 12
    assert max(tree.token_list[beams_of(request).live_tree.size :]) < 3
