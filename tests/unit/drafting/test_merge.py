"""Merge: several drafts in one tree, cut to the likeliest nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from speculant.drafting import DrafterNeeds, Merge, MergeDrafter, SubDrafter
from speculant.types import DraftTree
from tests.fakes import ScriptedDrafter
from tests.models import make_request

V = 20
Edges = dict[tuple[int, ...], float]  # the tokens on the way to each node -> its score


def edges(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens_to(node)) for node in range(tree.size)]


def merged(drafts: Sequence[DraftTree], limit: int) -> DraftTree:
    merge = Merge()
    for draft in drafts:
        merge.add(draft)
    return merge.tree(limit)


def test_merge_shares_common_prefixes() -> None:
    tree = merged([DraftTree.chain([1, 2, 3]), DraftTree.chain([1, 4]), DraftTree.chain([5])], 9)
    assert edges(tree) == [(1,), (1, 2), (1, 2, 3), (1, 4), (5,)]
    assert tree.scores is None
    assert tree.probs is None


def test_merge_takes_drafts_that_branch() -> None:
    tree = merged([DraftTree.of([1, 2, 3], [-1, -1, 1]), DraftTree.of([2, 3, 4], [-1, 0, 0])], 9)
    assert edges(tree) == [(1,), (2,), (2, 3), (2, 4)]


def test_merge_without_scores_is_cut_level_by_level() -> None:
    drafts = [DraftTree.chain([1, 2, 3, 4]), DraftTree.chain([5, 6, 7, 8])]
    assert edges(merged(drafts, 5)) == [(1,), (1, 2), (1, 2, 3), (5,), (5, 6)]
    assert edges(merged(drafts, 1)) == [(1,)]
    assert merged(drafts, 0).size == 0


def test_merge_keeps_the_likeliest_nodes() -> None:
    drafts = [DraftTree.chain([1, 2, 3], scores=[0.3, 1.0, 1.0]), DraftTree.chain([5, 6, 7], scores=[0.9, 0.9, 0.2])]
    tree = merged(drafts, 3)
    assert edges(tree) == [(1,), (5,), (5, 6)]
    assert tree.scores == [0.3, 0.9, 0.9]


def test_merge_takes_the_highest_score_where_members_agree() -> None:
    drafts = [DraftTree.chain([1, 2]), DraftTree.chain([1, 2], scores=[0.4, 0.8]), DraftTree.chain([1], scores=[0.6])]
    assert merged(drafts, 9).scores == [0.6, 0.8]
    assert merged([*drafts, DraftTree.chain([3])], 9).scores == [0.6, 0.8, 0.5]


chains = st.lists(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), max_size=5), max_size=4)


@given(chains, st.integers(0, 8))
def test_merge_is_a_legal_tree_of_its_drafts(given_chains: list[list[tuple[int, float]]], limit: int) -> None:
    drafts = [DraftTree.chain([t for t, _ in chain], scores=[s for _, s in chain]) for chain in given_chains]
    tree, known = merged(drafts, limit), {edge for draft in drafts for edge in edges(draft)}
    assert tree.size == min(limit, len(known))
    assert set(edges(tree)) <= known
    assert len(set(edges(tree))) == tree.size, "siblings differ"
    assert all(parent < node for node, parent in enumerate(tree.parent_list))


def merge_of(*sub_drafters: ScriptedDrafter) -> MergeDrafter:
    return MergeDrafter([SubDrafter("scripted", each, 4) for each in sub_drafters], V)


def test_merge_announces_a_tree_without_probs() -> None:
    drawn = ScriptedDrafter(lambda request: [1], DrafterNeeds(emits_probs=True, max_nodes=3))
    bounded = ScriptedDrafter(lambda request: [1], DrafterNeeds(max_nodes=5, nodes_per_beam=2))
    needs = merge_of(drawn, bounded).needs
    assert (needs.max_nodes, needs.usual_nodes) == (8, 8)
    assert (needs.emits_probs, needs.emits_tree, needs.nodes_per_beam) == (False, True, None)
    assert not merge_of(drawn).needs.emits_tree


@pytest.mark.parametrize("shared_noise", [True, False])
def test_merge_leaves_out_draws_under_a_ratio_rule(shared_noise: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A drawn node beside others would need its distribution; a warning is logged once."""
    probs = torch.full((1, V), 1 / V)
    drawn = ScriptedDrafter(
        lambda request: DraftTree.chain([3], None if request.drafts.shared_noise else probs),
        DrafterNeeds(emits_probs=True),
    )
    drafter = merge_of(drawn, ScriptedDrafter(lambda request: [4]))
    request = make_request([1, 2], shared_noise=shared_noise)
    drafter.begin(request)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            (tree,) = drafter.propose([request], [4])
    assert tree.token_list == ([3, 4] if shared_noise else [4])
    assert len(caplog.records) == (not shared_noise)
