"""Trees of the real drafter keep the output's distribution under every rule."""

from __future__ import annotations

import functools

import pytest

from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.model.specinfer import SpecInfer
from speculant.drafting.topology import ParallelChains, StaticTree, TreeTopology
from speculant.lab.exactness.tables import EXACT, FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances, KeyedChances
from tests.exactness.selection import combinations, slow_but
from tests.exactness.speculation import Case, enumerate_case
from tests.examples import examples
from tests.fakes import ROOMY, MakeCache, build_rig, few_blocks, known_verifiers, model_drafter, slotted

BRANCHINGS: dict[str, TreeTopology] = {
    "pair": StaticTree.of_widths([2]),
    "three": StaticTree.of_widths([3]),
    "two deep": StaticTree.of_widths([2, 1]),
    "uneven": StaticTree(frozenset({(0,), (1,), (0, 0), (0, 1)})),
    "two draws": ParallelChains((0, 0), 2),
    "three draws": ParallelChains((0, 0, 0), 1),
}
# With three tokens a second sibling has hardly a choice, and much that is wrong does not show.
PAIRS = [Pair(seed, vocab_size) for vocab_size in (3, 4) for seed in range(examples(4, least=1))]
VERIFIERS = [name for name, verifier in known_verifiers().items() if verifier.lossless and verifier.needs.branches]
SAMPLED = [name for name in VERIFIERS if not known_verifiers()[name].needs.shared_noise]


def drafting(
    topology: TreeTopology, pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted
) -> Drafter:
    return model_drafter(TableModel(pair.draft, pair.vocab_size), pair.vocab_size, chances, limits, cache, topology)


def of_two_models(
    draws: ParallelChains,
    pair: Pair,
    chances: Chances,
    limits: Limits,
    cache: MakeCache = slotted,
    budget: int | None = None,
) -> Drafter:
    """Draft with the pair's draft and with an unrelated one."""
    sources = []
    for table in (pair.draft, Pair(pair.seed + 100, pair.vocab_size).draft):
        model = TableModel(table, pair.vocab_size)
        made = cache(model.cache_shape, limits)
        sources.append(DraftModelRunner(model, made, chances, budget or limits.max_num_batched_tokens))
    return SpecInfer(sources, draws, pair.vocab_size)


def assert_exact(case: Case) -> float:
    found = enumerate_case(case)
    assert found.deviation() <= EXACT, case
    return found.mean_accepted


# The rule of each branching in `make test`; the smallest one has all rules, and test_rules.py has all shapes.
LARGE = {
    "three": "match",
    "two deep": "multi_draft",
    "uneven": "traversal",
    "two draws": "multi_draft",
    "three draws": "traversal",
}


@pytest.mark.parametrize(
    ("name", "verifier"),
    combinations(lambda name, verifier: LARGE.get(name, verifier) == verifier, BRANCHINGS, VERIFIERS),
)
def test_a_tree_keeps_the_distribution(name: str, verifier: str) -> None:
    topology = BRANCHINGS[name]
    accepted = 0.0
    for pair in PAIRS if topology.most_nodes < 4 else PAIRS[: examples(len(PAIRS), least=1)]:
        case = Case(
            pair,
            topology.most_nodes,
            verification=verifier,
            width=8,
            make_drafter=functools.partial(drafting, topology),
        )
        accepted += assert_exact(case)
    assert accepted > 0.5


@pytest.mark.parametrize("verifier", VERIFIERS)
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


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", slow_but(["two deep"], ["two deep", "two draws"]))
def test_transforms_and_penalties_in_a_tree(name: str, verifier: str) -> None:
    topology = BRANCHINGS[name]
    params = SamplingParams(
        max_tokens=None, temperature=0.8, top_p=0.9173, repetition_penalty=1.3, frequency_penalty=0.4
    )
    for seed in range(examples(4, least=1)):
        make = functools.partial(drafting, topology)
        assert_exact(Case(Pair(seed, 3, FULL_SUPPORT), 3, params, verifier, width=8, make_drafter=make))


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_tree_that_is_cut_keeps_the_distribution(verifier: str, limit: int) -> None:
    """A limit leaves nodes out by their number alone."""
    for name in ("uneven", "two draws"):
        make = functools.partial(drafting, BRANCHINGS[name])
        for seed in range(examples(3, least=1)):
            assert_exact(Case(Pair(seed, 3), limit, verification=verifier, width=8, make_drafter=make))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_several_steps_over_a_cache_of_blocks(verifier: str) -> None:
    blocks = few_blocks(40, keep_prefixes=False)
    make = functools.partial(drafting, BRANCHINGS["two deep"], cache=blocks)
    for seed in range(2):
        assert_exact(Case(Pair(seed, 2), 4, verification=verifier, steps=2, width=8, make_drafter=make, cache=blocks))


@pytest.mark.parametrize("verifier", SAMPLED)
def test_ends_within_a_tree(verifier: str) -> None:
    make = functools.partial(drafting, BRANCHINGS["uneven"])
    for seed in range(examples(4, least=2)):
        case = Case(
            Pair(seed, 3), 4, verification=verifier, prompt=(1,), ends=frozenset({2}), width=8, make_drafter=make
        )
        assert_exact(case)


def model_or_models(topology: TreeTopology | None, pair: Pair) -> Drafter:
    if isinstance(topology, ParallelChains) and len(set(topology.chains)) > 1:
        return of_two_models(topology, pair, KeyedChances(), ROOMY)
    return model_drafter(TableModel(pair.draft, 4), 4, KeyedChances(), topology=topology)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(topology, id=name, marks=pytest.mark.slow if name in ("three", "uneven", "three draws") else [])
        for name, topology in {"chain": None, **BRANCHINGS, "two models": ParallelChains((0, 1), 2)}.items()
    ],
)
@pytest.mark.parametrize(
    "distribution", [{"temperature": 0.0}, {"seed": 7, "temperature": 1.3}], ids=["greedy", "seeded"]
)
def test_seeded_and_greedy_tokens_are_those_without_a_tree(
    topology: TreeTopology | None, distribution: dict[str, float]
) -> None:
    """Candidates are the likeliest under the target's own noise, so accepted tokens are the target's."""
    pair, accepted = Pair(3, 4, FULL_SUPPORT), 0
    params = [
        SamplingParams(max_tokens=12, **{**distribution, **({"seed": i} if "seed" in distribution else {})})
        for i in range(8)
    ]  # type: ignore[arg-type]
    texts = []
    for with_draft in (False, True):
        drafter = model_or_models(topology, pair) if with_draft else None
        rig = build_rig(TableModel(pair.target, 4), drafter, length=4)
        requests = [rig.add((0, i % 4), each, str(i))[0] for i, each in enumerate(params)]
        while not all(request.finished for request in requests):
            rig.step()
        texts.append([request.output for request in requests])
        accepted = sum(request.metrics.speculative_decoding.num_accepted_draft_tokens for request in requests)
    assert texts[0] == texts[1]
    assert accepted > 10


def test_a_second_child_is_worth_something() -> None:
    pair = Pair(1, 4, ("dense",))
    make = [functools.partial(drafting, StaticTree.of_widths([width])) for width in (1, 2)]
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
