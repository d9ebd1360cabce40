"""Every drafter, found by its file, keeps the engine's contract and changes no greedy or seeded text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import HealthCheck, given, settings, strategies as st

from speculant import LLM, SamplingParams, plugins
from speculant.beams import Beams, Scored
from speculant.drafting import Drafter
from speculant.kernels import usable_sets
from speculant.types import CommittedRows, DraftTree, Request, RequestOutput
from tests.beams import beams_of, give_search, hypotheses
from tests.drafters import predicting
from tests.encoder_decoders import make_t5, write_t5
from tests.examples import examples
from tests.fakes import drafter_context
from tests.models import END, VOCAB_SIZE, Checkpoints
from tests.workshops import CONTINUATION, GREEDY, KIND, KINDS, NUM_SEQS, Kind, Workshop

DOCUMENTED = "last_seen"  # the one in docs/adding-a-drafter.md
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=11, max_tokens=40)
SEARCH = SamplingParams(beam_width=3, n=3, max_tokens=10)
few = settings(
    max_examples=examples(15, least=4),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


NATIVE = "native encoder-decoder"
QUICK = {  # the kinds of targets with which drafters that have to do with sources are tested without slow tests
    "cascade": "encoder-decoder", "draft_model": NATIVE, "early_exit": "encoder-decoder", "suffix": NATIVE,
}  # fmt: skip


def every_workshop() -> list[ParameterSet]:
    """Return the parameters of every drafter with a target of each kind."""
    found = list[ParameterSet]()
    for name in sorted({*plugins.names(KIND), DOCUMENTED}):
        for kind in KINDS:
            native = [] if usable_sets() or kind != NATIVE else [pytest.mark.skip("the native kernels are not built")]
            slow = [] if kind in ("decoder", QUICK.get(name)) else [pytest.mark.slow]
            own_id = name if kind == "decoder" else f"{name} {kind}"
            found.append(pytest.param((name, kind), marks=[*native, *slow], id=own_id))
    return found


@pytest.fixture(scope="session")
def encoder_decoders(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Write encoder-decoder checkpoints once."""
    folder = tmp_path_factory.mktemp("encoder-decoders")
    target, near = (write_t5(folder / str(noise), make_t5(noise)) for noise in (0.0, 0.1))
    return Checkpoints(target, near, near)


@pytest.fixture(params=every_workshop())
def workshop(request: pytest.FixtureRequest) -> Iterator[Workshop]:
    name, kind = request.param
    if name == DOCUMENTED:
        request.getfixturevalue("documented_drafter")
    of = request.getfixturevalue("encoder_decoders" if KINDS[kind].source else "checkpoints")
    made = Workshop(name, of, KINDS[kind])
    yield made
    made.check()


def sampled_request(
    workshop: Workshop, seq_id: int = 1, output: Sequence[int] = (), shared_noise: bool = False
) -> Request:
    """Make a request that a ratio rule (or, on shared noise, keyed noise) will check."""
    return workshop.request(seq_id, output, SamplingParams(temperature=0.7, max_tokens=64), shared_noise=shared_noise)


VARIANTS = {
    "greedy": Workshop.request,
    "seeded": functools.partial(Workshop.request, params=SEEDED),
    "ratio": sampled_request,
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def propose_one(drafter: Drafter, request: Request, limit: int) -> DraftTree:
    (tree,) = drafter.propose([request], [limit])
    return tree


def fresh_proposal(workshop: Workshop, request: Request, limit: int) -> DraftTree:
    drafter = workshop.build()
    drafter.begin(request)
    tree = propose_one(drafter, request, limit)
    drafter.end(request)
    return tree


def grow(drafter: Drafter, request: Request, tokens: Sequence[int]) -> None:
    """Commit tokens to a request, as the engine would."""
    if tokens:
        request.extend(tokens)
        request.rounds += 1
        start = len(request.tokens) - len(tokens) - 1
        drafter.observe(request, CommittedRows(start, request.tokens[start:-1], list(tokens)))


def assert_same(tree: DraftTree, expected: DraftTree) -> None:
    assert tree.token_list == expected.token_list
    assert tree.parent_list == expected.parent_list
    assert (tree.probs is None) == (expected.probs is None)
    if tree.probs is not None and expected.probs is not None:
        torch.testing.assert_close(tree.probs, expected.probs, rtol=0, atol=1e-12)


def assert_well_formed(drafter: Drafter, tree: DraftTree, request: Request, limit: int) -> None:
    assert tree.size <= limit
    assert tree.tokens.dtype == tree.parents.dtype == torch.int64
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parent_list)), "parents come before children"
    assert all(0 <= token < VOCAB_SIZE for token in tree.token_list)
    for node in range(-1, tree.size):
        siblings = [tree.token_list[child] for child in tree.children(node)]
        assert len(set(siblings)) == len(siblings), "siblings differ"
    assert tree.is_chain or drafter.needs.emits_tree, "only announced trees branch"
    wanted = drafter.needs.emits_probs and not request.drafts.shared_noise and tree.size > 0
    assert (tree.probs is not None) == wanted, "distributions are there where a ratio rule wants them"
    if tree.probs is not None:
        assert_distributions(tree)


def assert_distributions(tree: DraftTree) -> None:
    assert tree.probs is not None
    assert tree.probs.shape == (tree.size, VOCAB_SIZE)
    assert bool((tree.probs >= 0).all())
    torch.testing.assert_close(tree.probs.sum(-1), torch.ones(tree.size, dtype=tree.probs.dtype))
    drawn = tree.probs.gather(1, tree.tokens[:, None])
    assert bool((drawn > 0).all()), "a token was drawn that its distribution forbids"


@pytest.mark.covering(2)
@every_variant
@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_proposals_are_well_formed_and_within_their_limit(workshop: Workshop, variant: str, limit: int) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](workshop, output=CONTINUATION[:2])
    drafter.begin(request)
    tree = propose_one(drafter, request, limit)
    assert_well_formed(drafter, tree, request, limit)
    assert tree.size > 0 or limit == 0, "the drafter silently does nothing"


@pytest.mark.covering(1)
@every_variant
def test_requests_are_left_alone(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](workshop, output=CONTINUATION[:2])
    before = copy.deepcopy(vars(request))
    drafter.begin(request)
    propose_one(drafter, request, 4)
    drafter.observe(request, CommittedRows(0, request.tokens[:-1], CONTINUATION[:2]))
    drafter.end(request)
    assert vars(request) == before


def test_an_unknown_option_is_refused_with_a_suggestion(workshop: Workshop) -> None:
    drafter_module = plugins.load(KIND, workshop.name)
    context = drafter_context(VOCAB_SIZE, {"wndow": 3}, make_cache=workshop.make_cache)
    with pytest.raises(ValueError, match=r"(?s)'wndow'.*Fix"):
        drafter_module.build(context)


def test_no_sequences_no_proposals(workshop: Workshop) -> None:
    assert workshop.build().propose([], []) == []


@pytest.mark.covering(1)
@every_variant
def test_a_sequence_may_end_and_begin_again(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](workshop, output=CONTINUATION[:2])
    drafter.begin(request)
    first = propose_one(drafter, request, 4)
    drafter.end(request)
    drafter.begin(request)
    assert_same(propose_one(drafter, request, 4), first)


@pytest.mark.covering(1)
@every_variant
@few
@given(rounds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=5))
def test_a_drafter_catches_up_with_anything(workshop: Workshop, variant: str, rounds: list[tuple[int, int]]) -> None:
    """After any growth of a sequence and any proposals, the next proposal is that of a fresh drafter."""
    drafter, request = workshop.build(), VARIANTS[variant](workshop)
    drafter.begin(request)
    for length, limit in rounds:
        propose_one(drafter, request, limit)
        grow(drafter, request, CONTINUATION[request.num_output : request.num_output + length])
    tree = propose_one(drafter, request, 4)
    assert_same(tree, fresh_proposal(workshop, request, 4))
    drafter.end(request)
    workshop.check()


@pytest.mark.covering(1)
@every_variant
def test_a_rejected_draft_leaves_no_trace(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](workshop)
    drafter.begin(request)
    for kept in (0, 1, 2):
        drafted = propose_one(drafter, request, 4).token_list
        correction = next(token for token in (40, 41) if drafted[kept : kept + 1] != [token])
        grow(drafter, request, [*drafted[:kept], correction])
    tree = propose_one(drafter, request, 4)
    assert_same(tree, fresh_proposal(workshop, request, 4))


@pytest.mark.covering(1)
@every_variant
def test_an_accepted_draft_is_continued(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](workshop)
    drafter.begin(request)
    for bonus in (3, 4):
        grow(drafter, request, [*propose_one(drafter, request, 3).token_list, bonus])
    assert_same(propose_one(drafter, request, 4), fresh_proposal(workshop, request, 4))


@pytest.mark.covering(1)
@every_variant
def test_a_proposal_does_not_depend_on_the_batch(workshop: Workshop, variant: str) -> None:
    outputs = {1: CONTINUATION[:2], 2: CONTINUATION[:9], 3: []}
    alone = [
        fresh_proposal(workshop, VARIANTS[variant](workshop, seq_id, output), seq_id + 1)
        for seq_id, output in outputs.items()
    ]
    drafter = workshop.build()
    requests = [VARIANTS[variant](workshop, seq_id, output) for seq_id, output in outputs.items()]
    for request in requests:
        drafter.begin(request)
    together = drafter.propose(requests, [2, 3, 4])
    assert len(together) == 3
    for tree, expected in zip(together, alone, strict=True):
        assert_same(tree, expected)


def test_sequences_may_come_and_go_beside_others(workshop: Workshop) -> None:
    drafter, first, second = workshop.build(), workshop.request(1), workshop.request(2, CONTINUATION[:5])
    for request in (first, second):
        drafter.begin(request)
    drafter.propose([first, second], [3, 3])
    drafter.end(second)
    third = workshop.request(3, CONTINUATION[:7])
    drafter.begin(third)
    grow(drafter, first, CONTINUATION[:3])
    trees = drafter.propose([third, first], [3, 0])
    assert_same(trees[0], fresh_proposal(workshop, third, 3))
    assert trees[1].size == 0
    assert_same(propose_one(drafter, first, 3), fresh_proposal(workshop, first, 3))


def test_a_small_budget_delays_a_draft_and_does_not_change_it(workshop: Workshop) -> None:
    drafter, request = workshop.build(budget=4), workshop.request(output=CONTINUATION[:2])
    drafter.begin(request)
    expected = fresh_proposal(workshop, request, 3)
    trees = [propose_one(drafter, request, 3) for _ in range(len(request.tokens))]
    assert_same(trees[-1], expected)
    for tree in trees:
        if tree.size:
            assert_same(tree, expected)


def test_a_cache_of_its_own_is_given_back(workshop: Workshop) -> None:
    drafter = workshop.build()
    assert bool(workshop.caches) == drafter.needs.own_cache, "what is used is announced"
    free = [cache.free_tokens() for cache in workshop.caches]
    for round_ in range(2 * NUM_SEQS):  # more sequences than there is room for at a time
        request = sampled_request(workshop, round_)
        drafter.begin(request)
        propose_one(drafter, request, 3)
        drafter.end(request)
        workshop.check()
        assert [cache.free_tokens() for cache in workshop.caches] == free
        assert all(cache.length(round_) == 0 for cache in workshop.caches)


def test_a_request_may_end_without_a_proposal(workshop: Workshop) -> None:
    drafter, request = workshop.build(), workshop.request()
    drafter.begin(request)
    drafter.end(request)
    drafter.begin(request)
    propose_one(drafter, request, 0)
    drafter.end(request)


Plain = Callable[[Workshop, SamplingParams], list[RequestOutput]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Return what decodes TEXTS plainly, once for all drafters."""
    engines, known = dict[Kind, LLM](), list[tuple[Kind, SamplingParams, list[RequestOutput]]]()

    def decode(workshop: Workshop, params: SamplingParams) -> list[RequestOutput]:
        for kind, own, results in known:
            if kind is workshop.kind and own is params:
                return results
        if workshop.kind not in engines:
            engines[workshop.kind] = workshop.plain_llm()
        known.append((workshop.kind, params, engines[workshop.kind].generate(TEXTS, params)))
        return known[-1][2]

    return decode


TEXTS = ["def read(path):", "class A:", "hello world " * 4]


@pytest.fixture(scope="module")
def drafting() -> Callable[[Workshop], LLM]:
    """Return what makes an engine that drafts with a workshop's drafter, once for several tests."""
    made: dict[tuple[str, Kind], LLM] = {}

    def engine(workshop: Workshop) -> LLM:
        key = (workshop.name, workshop.kind)
        if key not in made:
            made[key] = workshop.llm()
        return made[key]

    return engine


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "params", [replace(each, max_tokens=examples(24, least=12)) for each in (GREEDY, SEEDED)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("length", [1, 4])
def test_text_is_that_of_plain_decoding(workshop: Workshop, plain: Plain, params: SamplingParams, length: int) -> None:
    expected = [each.outputs[0] for each in plain(workshop, params)]
    llm = workshop.llm(num_speculative_tokens=length)
    drafted, settings = 0, [predicting(workshop.name, params, each.token_ids) for each in expected]
    for _ in range(1 + workshop.method.learns):
        results = llm.generate(TEXTS, settings)
        assert [each.outputs[0].token_ids for each in results] == [each.token_ids for each in expected]
        assert [each.outputs[0].text for each in results] == [each.text for each in expected]
        drafted = sum(each.metrics.speculative_decoding.num_draft_tokens for each in results)
    assert drafted > 0, "nothing was drafted, so nothing was shown"
    assert workshop.name in llm.speculation
    llm.engine.check()


def test_a_sampled_request_is_served_by_a_fitting_rule(workshop: Workshop, drafting: Callable[[Workshop], LLM]) -> None:
    llm = drafting(workshop)
    (result,) = llm.generate(TEXTS[0], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 12
    assert result.metrics.verification is not None
    llm.engine.check()


LIMITS = (0, 1, 2, 6, 7, 15)


def a_search(workshop: Workshop, seq_id: int = 1, trunk: Sequence[int] = CONTINUATION[:2]) -> Request:
    """Make a search with a trunk and three hypotheses, one of which has been scored."""
    behind = {(3, 4): -1.0, (3, 5): -1.5, (6, 4): -2.0}
    live = hypotheses({(*trunk, *text): logprob for text, logprob in behind.items()})
    known = {live[1]: Scored(((7, -0.1), (8, -2.5)))}
    beams = Beams(3, 1.0, frozenset({END}), 60, 40, rounds=len(trunk) + 2, live=live, scored=known)
    request = workshop.request(seq_id, trunk, SamplingParams(beam_width=3, max_tokens=60))
    give_search(request, beams)
    return request


@pytest.mark.parametrize("limit", [pytest.param(n, marks=[] if n in (2, 15) else pytest.mark.slow) for n in LIMITS])
def test_live_hypotheses_are_extended_by_capable_drafters(workshop: Workshop, limit: int) -> None:
    drafter, request = workshop.build(), a_search(workshop)
    limit = limit if drafter.needs.nodes_per_beam else 0  # the others are not asked to
    drafter.begin(request)
    tree, live = propose_one(drafter, request, limit), beams_of(request).live_tree
    assert tree.size == live.size + limit if limit else tree.size == 0
    if limit:
        assert (tree.token_list[: live.size], tree.parent_list[: live.size]) == (live.token_list, live.parent_list)
    for node in range(-1, tree.size):
        siblings = [tree.token_list[child] for child in tree.children(node)]
        assert len(set(siblings)) == len(siblings), "siblings differ"
    assert END not in tree.token_list, "what has ended is not fed"
    assert all(depth > 2 for depth in tree.depths[live.size :]), "drafts stand behind the hypotheses"
    assert_same(propose_one(drafter, request, limit), tree)
    drafter.end(request)


def test_a_search_is_drafted_for_the_same_way_beside_others(workshop: Workshop) -> None:
    drafter = workshop.build()
    limits = [7 if drafter.needs.nodes_per_beam else 0, 3, 5 if drafter.needs.nodes_per_beam else 0]
    requests = [a_search(workshop, 1), workshop.request(2, CONTINUATION[:5]), a_search(workshop, 3, CONTINUATION[:6])]
    alone = [fresh_proposal(workshop, request, limit) for request, limit in zip(requests, limits, strict=True)]
    for request in requests:
        drafter.begin(request)
    for tree, expected in zip(drafter.propose(requests, limits), alone, strict=True):
        assert_same(tree, expected)


def test_beams_are_those_of_plain_decoding(
    workshop: Workshop, plain: Plain, drafting: Callable[[Workshop], LLM]
) -> None:
    expected = plain(workshop, SEARCH)
    llm = drafting(workshop)
    results = llm.generate(TEXTS, SEARCH)
    beams, same = ([beam for each in outputs for beam in each.outputs] for outputs in (results, expected))
    assert [(beam.token_ids, beam.text) for beam in beams] == [(beam.token_ids, beam.text) for beam in same]
    assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in same], abs=1e-12)
    passes = sum(each.metrics.timing.target_passes for each in results)
    drafted = sum(each.metrics.speculative_decoding.num_draft_tokens for each in results)
    can = llm.speculating_beams
    assert {each.metrics.verification for each in results} == {"beam" if can else None}
    assert (passes < SEARCH.max_tokens * len(TEXTS), drafted > 0) == (can, can)
    llm.engine.check()
