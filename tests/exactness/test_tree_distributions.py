"""Trees keep the output's distribution where they are cut, edited or end, over several steps and of several models."""

from __future__ import annotations

import functools

import pytest

from speculant.drafting import ParallelChains, StaticTree, TreeTopology
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from tests.exactness.selection import slow_but
from tests.exactness.speculation import BRANCHING, Case, assert_exact, draft_model, of_two_models
from tests.examples import examples
from tests.fakes import build_rig, few_blocks, known_verifiers, model_drafter

BRANCHINGS: dict[str, TreeTopology] = {
    "two deep": StaticTree.of_widths([2, 1]),
    "uneven": StaticTree(frozenset({(0,), (1,), (0, 0), (0, 1)})),
    "two draws": ParallelChains((0, 0), 2),
}
# With three tokens a second sibling has hardly a choice, and much that is wrong does not show.
PAIRS = [Pair(seed, vocab_size) for vocab_size in (3, 4) for seed in range(examples(4, least=1))]
SAMPLED = [name for name in BRANCHING if not known_verifiers()[name].needs.shared_noise]


@pytest.mark.parametrize("verifier", BRANCHING)
def test_chains_of_different_models_keep_the_distribution(verifier: str) -> None:
    accepted = 0.0
    for draws in (ParallelChains((0, 1), 2), ParallelChains((0, 1, 1), 1), ParallelChains((1, 0, 1), 1)):
        for pair in PAIRS[::2]:
            make = functools.partial(of_two_models, draws)
            accepted += assert_exact(Case(pair, draws.most_nodes, verification=verifier, width=8, make_drafter=make))
    assert accepted > 0.5


@pytest.mark.parametrize("verifier", SAMPLED)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_fewer_nodes_than_proposed_keep_the_distribution(verifier: str, limit: int) -> None:
    make = functools.partial(of_two_models, ParallelChains((0, 1), 2))
    for seed in range(examples(3, least=1)):
        assert_exact(Case(Pair(seed, 3), limit, verification=verifier, width=8, make_drafter=make))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_models_that_catch_up_in_parts_keep_the_distribution(verifier: str) -> None:
    """A prompt beyond the drafts' budget: they see it in several rounds."""
    make = functools.partial(of_two_models, ParallelChains((0, 1), 1), budget=2)
    for seed in range(examples(2, least=1)):
        case = Case(Pair(seed, 2), 2, verification=verifier, prompt=(0, 1, 1), make_drafter=make)
        assert_exact(case)


@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize("name", slow_but(["two deep"], ["two deep", "two draws"]))
def test_transforms_and_penalties_in_a_tree(name: str, verifier: str) -> None:
    topology = BRANCHINGS[name]
    params = SamplingParams(
        max_tokens=None, temperature=0.8, top_p=0.9173, repetition_penalty=1.3, frequency_penalty=0.4
    )
    for seed in range(examples(4, least=1)):
        make = functools.partial(draft_model, topology=topology)
        assert_exact(Case(Pair(seed, 3, FULL_SUPPORT), 3, params, verifier, width=8, make_drafter=make))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_tree_that_is_cut_keeps_the_distribution(verifier: str, limit: int) -> None:
    """A limit leaves nodes out by their number alone."""
    for name in ("uneven", "two draws"):
        make = functools.partial(draft_model, topology=BRANCHINGS[name])
        for seed in range(examples(3, least=1)):
            assert_exact(Case(Pair(seed, 3), limit, verification=verifier, width=8, make_drafter=make))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_several_steps_over_a_cache_of_blocks(verifier: str) -> None:
    blocks = few_blocks(40, keep_prefixes=False)
    make = functools.partial(draft_model, topology=BRANCHINGS["two deep"], cache=blocks)
    for seed in range(2):
        assert_exact(Case(Pair(seed, 2), 4, verification=verifier, steps=2, width=8, make_drafter=make, cache=blocks))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_ends_within_a_tree(verifier: str) -> None:
    make = functools.partial(draft_model, topology=BRANCHINGS["uneven"])
    for seed in range(examples(4, least=2)):
        case = Case(
            Pair(seed, 3), 4, verification=verifier, prompt=(1,), ends=frozenset({2}), width=8, make_drafter=make
        )
        assert_exact(case)


def test_a_second_child_is_worth_something() -> None:
    pair = Pair(1, 4, ("dense",))
    make = [functools.partial(draft_model, topology=StaticTree.of_widths([width])) for width in (1, 2)]
    one, two = (assert_exact(Case(pair, 2, verification="traversal", make_drafter=each)) for each in make)
    assert two > one + 0.01


def test_nodes_of_a_tree_do_not_stay_in_the_drafts_cache() -> None:
    pair = Pair(2, 4, FULL_SUPPORT)
    drafter = model_drafter(TableModel(pair.draft, 4), 4, topology=BRANCHINGS["uneven"])
    rig = build_rig(TableModel(pair.target, 4), drafter, length=4)
    (request,) = rig.add((0, 1), SamplingParams(max_tokens=9, seed=1), "a")
    while not request.finished:
        before = list(request.tokens)
        rig.step()
        if not request.finished:
            assert drafter.caches[0].length(request.seq_id) in (0, len(before))
        drafter.caches[0].check()
