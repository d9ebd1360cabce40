"""Every drafter, found by its file, keeps the engine's contract and changes no greedy or seeded text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculant import LLM, SamplingParams, plugins
from speculant.beams import Beams, Scored
from speculant.cache.base import CacheShape, KVCache
from speculant.cache.factory import paged_cache
from speculant.drafting.base import Drafter, DrafterContext, Method
from speculant.models.base import CausalLM
from speculant.models.weights.load import load_model
from speculant.sampling.chance import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request, RequestOutput
from tests.beams import beams_of, give_search, hypotheses
from tests.drafters import model_of, options_of, predicting
from tests.examples import examples
from tests.heads import Shown
from tests.models import END, HIDDEN_SIZE, VOCAB_SIZE, Checkpoints, make_request

KIND = "speculant.drafting"
DOCUMENTED = "last_seen"  # the one in docs/adding-a-drafter.md
NUM_SEQS, MAX_LEN, BLOCK = 4, 96, 4
PROMPT = [7, 1, 2, 3, 4, 1, 2, 3, 5, 1, 2]
CONTINUATION = [3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 9, 9, 1, 2, 3, 5, 1, 2, 3, 4, 1, 2, 3, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=11, max_tokens=40)
SEARCH = SamplingParams(beam_width=3, n=3, max_tokens=10)
few = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@dataclass
class Workshop:
    """Builds one drafter as often as a test wants, and keeps the caches that it asked for."""

    name: str
    checkpoints: Checkpoints
    caches: list[KVCache] = field(default_factory=list)

    @functools.cached_property
    def target_cache(self) -> KVCache:
        """The target's cache, which holds no sequence."""
        return paged_cache(load_once(self.checkpoints.target).cache_shape, NUM_SEQS * MAX_LEN // BLOCK, BLOCK)

    @property
    def method(self) -> Method:
        method: Method = plugins.load(KIND, self.name).METHOD
        return method

    @property
    def model(self) -> str | None:
        return model_of(self.name, self.checkpoints.near, HIDDEN_SIZE, VOCAB_SIZE)

    @property
    def options(self) -> dict[str, Any]:
        return options_of(self.name, VOCAB_SIZE, [[*PROMPT, *CONTINUATION]])

    def llm(self, target: str, **speculation: Any) -> LLM:
        """Make an engine that drafts with it."""
        return LLM(
            target,
            draft_model=self.model,
            speculative_config={"method": self.name, **self.options, **speculation},
            dtype="float64",
        )

    def build(self, budget: int = 256) -> Drafter:
        """Make a drafter that has seen what PROMPT leads to, if it learns."""
        context = DrafterContext(
            options=self.options,
            model=self.model,
            vocab_size=VOCAB_SIZE,
            device=torch.device("cpu"),
            chances=KeyedChances(),
            max_num_batched_tokens=budget,
            load_draft=load_once,
            make_cache=self._make_cache,
            target=load_once(self.checkpoints.target),
            target_cache=lambda: self.target_cache,
        )
        drafter: Drafter = plugins.load(KIND, self.name).build(context)
        if drafter.needs.hidden_layers or drafter.needs.target_inputs:
            drafter = Shown(drafter, load_once(self.checkpoints.target))
        if self.method.learns:
            teach(drafter, PROMPT, CONTINUATION)
        return drafter

    def _make_cache(self, shape: CacheShape) -> KVCache:
        self.caches.append(paged_cache(shape, NUM_SEQS * MAX_LEN // BLOCK, BLOCK))
        return self.caches[-1]

    def check(self) -> None:
        for cache in self.caches:
            cache.check()
        self.target_cache.check()
        assert self.target_cache.free_tokens() == NUM_SEQS * MAX_LEN // BLOCK * BLOCK, "it is left as it was"


@functools.cache
def load_once(source: str, head_tokens: tuple[int, ...] = ()) -> CausalLM:
    """Load a model, which has no state, once for all drafters."""
    return load_model(source, "float64", "cpu", head_tokens=head_tokens).model


def teach(drafter: Drafter, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Let a drafter see a whole request."""
    request = make_request(prompt, output, GREEDY, seq_id=999, finish_reason="length")
    drafter.begin(request)
    drafter.observe(request, CommittedRows(0, request.tokens[:-1], output))
    drafter.end(request)


@pytest.fixture(params=sorted({*plugins.names(KIND), DOCUMENTED}))
def workshop(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Workshop]:
    if request.param == DOCUMENTED:
        request.getfixturevalue("documented_drafter")
    made = Workshop(request.param, checkpoints)
    yield made
    made.check()


def a_request(seq_id: int = 1, output: Sequence[int] = (), params: SamplingParams = GREEDY, **fields: Any) -> Request:
    """Make a request with a prediction, which most drafters don't read."""
    return make_request(PROMPT, output, params, seq_id, prediction=tuple(CONTINUATION), **fields)


def sampled_request(seq_id: int = 1, output: Sequence[int] = (), shared_noise: bool = False) -> Request:
    """Make a request that a ratio rule (or, on shared noise, keyed noise) will check."""
    return a_request(seq_id, output, SamplingParams(temperature=0.7, max_tokens=64), shared_noise=shared_noise)


VARIANTS = {
    "greedy": a_request,
    "seeded": functools.partial(a_request, params=SEEDED),
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
    wanted = drafter.needs.emits_probs and not request.shared_noise and tree.size > 0
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
    drafter, request = workshop.build(), VARIANTS[variant](output=CONTINUATION[:2])
    drafter.begin(request)
    tree = propose_one(drafter, request, limit)
    assert_well_formed(drafter, tree, request, limit)
    assert tree.size > 0 or limit == 0, "the drafter silently does nothing"


@pytest.mark.covering(1)
@every_variant
def test_requests_are_left_alone(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](output=CONTINUATION[:2])
    before = copy.deepcopy(vars(request))
    drafter.begin(request)
    propose_one(drafter, request, 4)
    drafter.observe(request, CommittedRows(0, request.tokens[:-1], CONTINUATION[:2]))
    drafter.end(request)
    assert vars(request) == before


def test_an_unknown_option_is_refused_with_a_suggestion(workshop: Workshop) -> None:
    drafter_module = plugins.load(KIND, workshop.name)
    context = DrafterContext(
        {"wndow": 3}, None, VOCAB_SIZE, torch.device("cpu"), KeyedChances(), 8, load_once, workshop._make_cache
    )
    with pytest.raises(ValueError, match=r"(?s)'wndow'.*Fix"):
        drafter_module.build(context)


def test_no_sequences_no_proposals(workshop: Workshop) -> None:
    assert workshop.build().propose([], []) == []


@pytest.mark.covering(1)
@every_variant
def test_a_sequence_may_end_and_begin_again(workshop: Workshop, variant: str) -> None:
    drafter, request = workshop.build(), VARIANTS[variant](output=CONTINUATION[:2])
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
    drafter, request = workshop.build(), VARIANTS[variant]()
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
    drafter, request = workshop.build(), VARIANTS[variant]()
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
    drafter, request = workshop.build(), VARIANTS[variant]()
    drafter.begin(request)
    for bonus in (3, 4):
        grow(drafter, request, [*propose_one(drafter, request, 3).token_list, bonus])
    assert_same(propose_one(drafter, request, 4), fresh_proposal(workshop, request, 4))


@pytest.mark.covering(1)
@every_variant
def test_a_proposal_does_not_depend_on_the_batch(workshop: Workshop, variant: str) -> None:
    outputs = {1: CONTINUATION[:2], 2: CONTINUATION[:9], 3: []}
    alone = [
        fresh_proposal(workshop, VARIANTS[variant](seq_id, output), seq_id + 1) for seq_id, output in outputs.items()
    ]
    drafter = workshop.build()
    requests = [VARIANTS[variant](seq_id, output) for seq_id, output in outputs.items()]
    for request in requests:
        drafter.begin(request)
    together = drafter.propose(requests, [2, 3, 4])
    assert len(together) == 3
    for tree, expected in zip(together, alone, strict=True):
        assert_same(tree, expected)


def test_sequences_may_come_and_go_beside_others(workshop: Workshop) -> None:
    drafter, first, second = workshop.build(), a_request(1), a_request(2, CONTINUATION[:5])
    for request in (first, second):
        drafter.begin(request)
    drafter.propose([first, second], [3, 3])
    drafter.end(second)
    third = a_request(3, CONTINUATION[:7])
    drafter.begin(third)
    grow(drafter, first, CONTINUATION[:3])
    trees = drafter.propose([third, first], [3, 0])
    assert_same(trees[0], fresh_proposal(workshop, third, 3))
    assert trees[1].size == 0
    assert_same(propose_one(drafter, first, 3), fresh_proposal(workshop, first, 3))


def test_a_small_budget_delays_a_draft_and_does_not_change_it(workshop: Workshop) -> None:
    drafter, request = workshop.build(budget=4), a_request(output=CONTINUATION[:2])
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
        request = sampled_request(round_)
        drafter.begin(request)
        propose_one(drafter, request, 3)
        drafter.end(request)
        workshop.check()
        assert [cache.free_tokens() for cache in workshop.caches] == free
        assert all(cache.length(round_) == 0 for cache in workshop.caches)


def test_a_request_may_end_without_a_proposal(workshop: Workshop) -> None:
    drafter, request = workshop.build(), a_request()
    drafter.begin(request)
    drafter.end(request)
    drafter.begin(request)
    propose_one(drafter, request, 0)
    drafter.end(request)


Plain = Callable[[SamplingParams], list[RequestOutput]]


@pytest.fixture(scope="module")
def plain(checkpoints: Checkpoints) -> Plain:
    """Return what decodes TEXTS plainly, once for all drafters."""
    llm, known = LLM(checkpoints.target, dtype="float64"), list[tuple[SamplingParams, list[RequestOutput]]]()

    def decode(params: SamplingParams) -> list[RequestOutput]:
        for own, results in known:
            if own is params:
                return results
        known.append((params, llm.generate(TEXTS, params)))
        return known[-1][1]

    return decode


TEXTS = ["def read(path):", "class A:", "hello world " * 4]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "params", [replace(each, max_tokens=24) for each in (GREEDY, SEEDED)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("length", [1, 4])
def test_text_is_that_of_plain_decoding(
    workshop: Workshop, plain: Plain, checkpoints: Checkpoints, params: SamplingParams, length: int
) -> None:
    expected = [each.outputs[0] for each in plain(params)]
    llm = workshop.llm(checkpoints.target, num_speculative_tokens=length)
    drafted, settings = 0, [predicting(workshop.name, params, each.token_ids) for each in expected]
    for _ in range(1 + workshop.method.learns):
        results = llm.generate(TEXTS, settings)
        assert [each.outputs[0].token_ids for each in results] == [each.token_ids for each in expected]
        assert [each.outputs[0].text for each in results] == [each.text for each in expected]
        drafted = sum(each.metrics.speculative_decoding.num_draft_tokens for each in results)
    assert drafted > 0, "nothing was drafted, so nothing was shown"
    assert workshop.name in llm.speculation
    llm.engine.check()


def test_a_sampled_request_is_served_by_a_fitting_rule(workshop: Workshop, checkpoints: Checkpoints) -> None:
    llm = workshop.llm(checkpoints.target)
    (result,) = llm.generate(TEXTS[0], SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 12
    assert result.metrics.verification is not None
    llm.engine.check()


LIMITS = (0, 1, 2, 6, 7, 15)


def a_search(seq_id: int = 1, trunk: Sequence[int] = CONTINUATION[:2]) -> Request:
    """Make a search with a trunk and three hypotheses, one of which has been scored."""
    behind = {(3, 4): -1.0, (3, 5): -1.5, (6, 4): -2.0}
    live = hypotheses({(*trunk, *text): logprob for text, logprob in behind.items()})
    known = {live[1]: Scored(((7, -0.1), (8, -2.5)))}
    beams = Beams(3, 1.0, frozenset({END}), 60, 40, rounds=len(trunk) + 2, live=live, scored=known)
    request = a_request(seq_id, trunk, SamplingParams(beam_width=3, max_tokens=60))
    give_search(request, beams)
    return request


@pytest.mark.parametrize("limit", [pytest.param(n, marks=[] if n in (2, 15) else pytest.mark.slow) for n in LIMITS])
def test_live_hypotheses_are_extended_by_capable_drafters(workshop: Workshop, limit: int) -> None:
    drafter, request = workshop.build(), a_search()
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
    requests = [a_search(1), a_request(2, CONTINUATION[:5]), a_search(3, CONTINUATION[:6])]
    alone = [fresh_proposal(workshop, request, limit) for request, limit in zip(requests, limits, strict=True)]
    for request in requests:
        drafter.begin(request)
    for tree, expected in zip(drafter.propose(requests, limits), alone, strict=True):
        assert_same(tree, expected)


def test_beams_are_those_of_plain_decoding(workshop: Workshop, plain: Plain, checkpoints: Checkpoints) -> None:
    expected = plain(SEARCH)
    llm = workshop.llm(checkpoints.target)
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
