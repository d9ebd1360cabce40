"""Texts of an encoder-decoder model: exact by enumeration, the same in any batch, and nothing is left behind.

The next token's distribution depends on the source that a pass reads from the storage, so a wrong source shows.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, KVStorage, Source, Sources, slotted_cache
from speculant.config import POLICIES, Limits
from speculant.drafting import (
    Drafter,
    DrafterNeeds,
    DraftModelRunner,
    DraftSources,
    ModelDrafter,
    NgramDrafter,
    NgramOptions,
    ParallelChains,
    StaticTree,
    TreeTopology,
)
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel, conditioned, deviation
from speculant.models import Batch, Hidden
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from speculant.types import ANYONE, Client, DraftTree, Request
from tests.exactness.plain_beams import exact_distribution, plain_beams
from tests.exactness.searches import assert_found, wide
from tests.exactness.selection import slow_but
from tests.exactness.speculation import (
    BRANCHING,
    Case,
    MakeDrafter,
    assert_exact,
    draft_model,
    enumerate_case,
    ngram,
)
from tests.examples import examples
from tests.fakes import MakeCache, Rig, ScriptedDrafter, build_rig, few_blocks, model_drafter
from tests.models import make_request

SOURCE = (1, 0, 1)
BLOCKS = few_blocks(64, keep_prefixes=False)


def two_slots(shape: CacheShape, limits: Limits) -> KVCache:
    """Make a slotted cache with a slot for each text and for each source."""
    return slotted_cache(shape, 2 * limits.max_num_seqs, limits.max_model_len)


both = pytest.mark.parametrize("cache", [BLOCKS, two_slots], ids=["paged", "slotted"])


def case_of(pair: Pair, length: int, cache: MakeCache = two_slots, **own: Any) -> Case:
    return Case(pair, length, source=SOURCE, cache=cache, **{"width": 8, **own})


# --- the distribution


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize("verifier", ["rejection", "match", "block"])
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_chains_keep_the_distribution(vocab_size: int, length: int, verifier: str, cache: MakeCache) -> None:
    for seed in range(examples(6, least=1)):
        case = case_of(Pair(seed, vocab_size), length, cache, verification=verifier)
        assert_exact(case)


def test_another_source_has_another_distribution() -> None:
    """The comparison can fail: the same tokens after another source are not the same distribution."""
    pair = Pair(1, 3, FULL_SUPPORT)
    found, other = (enumerate_case(replace(case_of(pair, 1), source=source)) for source in (SOURCE, (1, 1, 0)))
    assert deviation(found.tokens, other.tokens) > 0.01


TREES: dict[str, TreeTopology] = {
    "pair": StaticTree.of_widths([2]),
    "two deep": StaticTree.of_widths([2, 1]),
    "two draws": ParallelChains((0, 0), 2),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", BRANCHING)
@pytest.mark.parametrize("name", TREES)
def test_trees_keep_the_distribution(name: str, verifier: str) -> None:
    make = functools.partial(draft_model, topology=TREES[name])
    for seed in range(examples(3, least=1)):
        case = case_of(Pair(seed, 3), TREES[name].most_nodes, BLOCKS, verification=verifier, make_drafter=make)
        assert_exact(case)


def with_encoder(pair: Pair, chances: Chances, limits: Limits, topology: TreeTopology | None = None) -> Drafter:
    draft = TableModel(pair.draft, pair.vocab_size, has_source=True)
    return model_drafter(draft, pair.vocab_size, chances, limits, two_slots, topology)


@pytest.mark.covering(1)
@pytest.mark.parametrize("topology", [None, *TREES.values()], ids=["chain", *TREES])
@pytest.mark.parametrize("verifier", BRANCHING)
def test_drafts_after_a_source_keep_the_distribution(verifier: str, topology: TreeTopology | None) -> None:
    """The draft model's distributions depend on the source too."""
    make, length = functools.partial(with_encoder, topology=topology), topology.most_nodes if topology else 2
    for seed in range(examples(3, least=1)):
        case = case_of(Pair(seed, 3), length, BLOCKS, verification=verifier, make_drafter=make)
        assert_exact(case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("make_drafter", [draft_model, pytest.param(with_encoder, marks=pytest.mark.slow), ngram])
@pytest.mark.parametrize("budget", [3, 4, 6])
def test_decoder_prompts_in_chunks_keep_the_distribution(budget: int, make_drafter: MakeDrafter) -> None:
    """A source of three tokens takes a whole step of the least budget."""
    params = SamplingParams(max_tokens=None, presence_penalty=0.6)
    for seed in range(examples(3, least=1)):
        case = case_of(
            Pair(seed, 2, FULL_SUPPORT), 1, BLOCKS, prompt=(0, 1, 1, 0, 1), budget=budget, width=1, params=params,
            make_drafter=make_drafter,
        )  # fmt: skip
        assert_exact(case)


@both
def test_several_steps_and_ends_keep_the_distribution(cache: MakeCache) -> None:
    for seed in range(examples(4, least=1)):
        several = case_of(Pair(seed, 2), 1, cache, steps=3)
        ends = case_of(Pair(seed, 3), 3, cache, prompt=(1,), ends=frozenset({2}))
        assert_exact(several)
        assert_exact(ends)


# --- the same text in any batch

V = 4
PAIR = Pair(6, V, FULL_SUPPORT)
LIMITS = Limits(max_model_len=20, max_num_seqs=4, max_num_batched_tokens=16)
LONGEST = LIMITS.max_source_len
ROOM = few_blocks(40)
SCARCE = few_blocks(10)  # a text and a source may need five and four


def reader(cache: MakeCache = ROOM, topology: TreeTopology | None = None, on_target: bool = False) -> ModelDrafter:
    """Make the drafter of a model with an encoder, which may read the target's results instead."""
    draft = TableModel(PAIR.draft, V, has_source=True)
    drafter = model_drafter(draft, V, limits=LIMITS, cache=cache, topology=topology)
    if on_target:
        drafter.read_encoder(encoder_decoder())
    return drafter


def fan(request: Request) -> DraftTree:
    return DraftTree(torch.tensor([0, 1, 2, 3, 1]), torch.tensor([-1, -1, 1, 1, 2]))


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS),
    "starved model": lambda: model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS, cache=few_blocks(6)),
    "encoder-decoder": reader,
    "starved encoder-decoder": lambda: reader(few_blocks(9)),
    "encoder-decoder's tree": lambda: reader(few_blocks(14), StaticTree.of_widths([2, 1])),
    "on the target's encoder": lambda: reader(on_target=True),
    "starved on the target's": lambda: reader(few_blocks(9), on_target=True),
    "tree": lambda: ScriptedDrafter(fan, DrafterNeeds(emits_tree=True)),
    "ngram": lambda: NgramDrafter(NgramOptions()),
}
SLOW = ("encoder-decoder", "encoder-decoder's tree", "starved on the target's")
every_drafter = pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in DRAFTERS]
)
SOURCES = [(0, 1, 2), (1,) * LONGEST, (2, 3), (0, 1, 2), (3, 0, 3, 0, 1, 1, 2), (1,) * LONGEST, (2,), (0, 1, 2)]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 4, "presence_penalty": 0.4},
    {"seed": 5, "n": 4},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"beam_width": 3, "n": 2},
    {"seed": 6, "temperature": 0.7, "top_k": 3},
    {"beam_width": 2, "n": 1, "length_penalty": 0.4},
    {"seed": 7, "min_tokens": 3},
]
PROMPTS = [(0,), (0, 3, 1), (0,), (0,), (0, 1), (0, 3, 1), (0,), (0,)]


def encoder_decoder() -> TableModel:
    return TableModel(PAIR.target, V, has_source=True)


def add_all(rig: Rig, clients: Sequence[Client] = (ANYONE,)) -> list[Request]:
    requests = []
    for index, (source, prompt, settings) in enumerate(zip(SOURCES, PROMPTS, SETTINGS, strict=True)):
        logprobs = {} if "beam_width" in settings else {"logprobs": 1}
        params = SamplingParams(max_tokens=12, prompt_logprobs=1, **logprobs, **settings)
        requests += rig.add(prompt, params, str(index), source=source, client=clients[index % len(clients)])
    return requests


def results(requests: Sequence[Request]) -> list[Any]:
    return [(request.output, request.logprobs, request.prompt_logprobs, request.ending.reason) for request in requests]


@functools.cache
def alone(ends: frozenset[int] = frozenset()) -> Sequence[Any]:
    """Return each request's results without drafts, one at a time, with memory for everything."""
    rig = build_rig(encoder_decoder(), limits=Limits(20, 1, 64), cache=few_blocks(40), ends=ends)
    requests = add_all(rig)
    rig.finish()
    assert rig.engine.metrics.preemptions == 0
    return results(requests)


@pytest.mark.covering(1)
@both
@every_drafter
def test_requests_together_have_the_results_they_have_alone(drafter: str, cache: MakeCache) -> None:
    target, ends = encoder_decoder(), frozenset({3})
    rig = build_rig(target, DRAFTERS[drafter](), length=5, limits=LIMITS, cache=cache, ends=ends)
    requests = add_all(rig)
    rig.finish()
    assert results(requests) == alone(ends)
    assert max(target.num_encoded + target.num_rows) <= LIMITS.max_num_batched_tokens


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", POLICIES)
@every_drafter
def test_preempted_requests_have_the_results_they_have_alone(drafter: str, policy: str) -> None:
    target, limits = encoder_decoder(), replace(LIMITS, scheduling_policy=policy)
    rig = build_rig(target, DRAFTERS[drafter](), length=5, limits=limits, cache=SCARCE)
    requests = add_all(rig)
    rig.finish()
    assert results(requests) == alone()
    assert rig.engine.metrics.preemptions > 0


@pytest.mark.parametrize("drafter", slow_but(["model", "starved encoder-decoder"], DRAFTERS))
def test_results_do_not_depend_on_the_clients(drafter: str) -> None:
    rig = build_rig(encoder_decoder(), DRAFTERS[drafter](), length=5, limits=LIMITS, cache=SCARCE)
    requests = add_all(rig, [Client("one"), Client("two", 2.0), Client("three")])
    rig.finish()
    assert results(requests) == alone()


@pytest.mark.parametrize("width", [1, 2, 4])
def test_beams_are_those_of_the_plain_search(width: int) -> None:
    for seed, source in enumerate([(0,), SOURCE, (2, 2, 1, 0)]):
        pair, ends = Pair(seed, 4), frozenset({2})
        rig = build_rig(TableModel(pair.target, 4, has_source=True), limits=LIMITS, cache=BLOCKS, ends=ends)
        requests = rig.add((0, 1), wide(width, 5), source=source)
        rig.finish()
        distribution = exact_distribution(conditioned(pair.target, source))
        assert_found(requests, plain_beams(distribution, (0, 1), width, 5, ends))


# --- sources are shared, and released


def test_equal_sources_are_encoded_once() -> None:
    target = encoder_decoder()
    rig = build_rig(target, limits=LIMITS, cache=few_blocks(40))
    for index, source in enumerate([SOURCE, SOURCE, (2, 2)]):
        rig.add((0,), SamplingParams(seed=index, max_tokens=8), str(index), source=source)
    rig.step()
    rig.add((0, 1), SamplingParams(max_tokens=4), "late", source=SOURCE)
    rig.add((0, 1), SamplingParams(max_tokens=4), "another tenant", source=SOURCE, cache_salt="other")
    rig.finish()
    assert target.num_encoded == [len(SOURCE) + 2, len(SOURCE)]
    assert rig.engine.metrics.prompt_tokens == 3 * 1 + 2 * 2 + 4 * len(SOURCE) + 2


def test_samples_share_a_source() -> None:
    target = encoder_decoder()
    rig = build_rig(target, limits=LIMITS, cache=few_blocks(40))
    rig.add((0,), SamplingParams(n=4, seed=1, max_tokens=6), source=SOURCE)
    rig.finish()
    assert target.num_encoded == [len(SOURCE)]


def test_a_source_stays_until_its_last_text_ends() -> None:
    rig = build_rig(encoder_decoder(), limits=LIMITS, cache=few_blocks(40))
    rig.add((0,), SamplingParams(max_tokens=2), "short", source=SOURCE)
    (longer,) = rig.add((0,), SamplingParams(max_tokens=9), "long", source=SOURCE)
    while longer.num_output < 5:
        rig.step()
    source = rig.engine._scheduler.sources.of(longer.seq_id)
    assert source is not None
    assert (source.holders, rig.cache.length(source.seq_id)) == ({longer.seq_id}, len(SOURCE))
    rig.abort("long")
    assert rig.cache.length(source.seq_id) == 0
    rig.finish()


@pytest.mark.parametrize("drafter", slow_but(["starved model", "on the target's encoder", "tree"], DRAFTERS))
def test_nothing_is_left_behind_where_memory_is_scarce(drafter: str) -> None:
    """Requests come, end, are preempted and aborted in random order; then all memory is free."""
    rng, preemptions = random.Random(drafter), 0
    for _ in range(examples(6, least=1)):
        rig = build_rig(encoder_decoder(), DRAFTERS[drafter](), length=3, limits=LIMITS, cache=SCARCE)
        for number in range(16):
            source = [rng.randrange(V) for _ in range(rng.choice([1, 2, 5, LONGEST]))]
            kind = rng.choice([{"temperature": 0}, {"seed": 1, "n": 3}, {"beam_width": 2, "n": 2}])
            params = SamplingParams(max_tokens=rng.randrange(1, 14), **kind)
            rig.add((0,) * rng.choice([1, 1, 4]), params, str(number), source=source)
            for _ in range(rng.randrange(4)):
                rig.step()
            if rng.random() < 0.3:
                rig.requests = [each for each in rig.requests if each.request_id != (ended := str(rng.randrange(16)))]
                rig.abort(ended)
        rig.finish()
        preemptions += rig.engine.metrics.preemptions
        assert not rig.engine._scheduler.sources._by_key
        assert_no_source_is_left(rig)
    assert preemptions > 0


# --- sources of draft models


def drafts_of(rig: Rig) -> DraftSources | None:
    """Return the sources of a rig's draft model, checked; None = it has no draft model."""
    drafter = rig.engine._drafters.sub_drafters.get("default")
    if not isinstance(drafter, ModelDrafter):
        return None
    drafter._runner.sources.check()
    return drafter._runner.sources


def assert_no_source_is_left(rig: Rig) -> None:
    drafts = drafts_of(rig)
    assert drafts is None or not (drafts._sources._by_key or drafts._observed)
    assert all(cache.free_tokens() == cache.num_blocks * cache.block_size for cache in rig.caches)


def draft_rig(draft: TableModel) -> Rig:
    drafter = model_drafter(draft, V, limits=LIMITS, cache=ROOM)
    return build_rig(encoder_decoder(), drafter, length=3, limits=LIMITS, cache=ROOM)


def test_a_draft_model_encodes_equal_sources_once() -> None:
    draft = TableModel(PAIR.draft, V, has_source=True)
    rig = draft_rig(draft)
    for index, source in enumerate([SOURCE, SOURCE, (2, 2), (1,) * LONGEST]):
        rig.add((0,), SamplingParams(seed=index, max_tokens=8), str(index), source=source)
    rig.add((0, 1), SamplingParams(max_tokens=4), "another tenant", source=SOURCE, cache_salt="other")
    rig.finish()
    assert sum(draft.num_encoded) == 2 * len(SOURCE) + 2 + LONGEST
    assert max(draft.num_encoded) + 3 <= LIMITS.max_num_batched_tokens
    assert_no_source_is_left(rig)


@pytest.mark.parametrize(("salts", "encoded"), [(("", "other"), [[5], [5, 5]]), (("", ""), [[5], [5]])])
def test_a_round_encodes_within_its_budget(salts: Sequence[str], encoded: Sequence[Sequence[int]]) -> None:
    """Two sources of 5 tokens, or one, and texts of a token, with 8 rows in a round."""
    draft = TableModel(PAIR.draft, V, has_source=True)
    runner = DraftModelRunner(draft, ROOM(draft.cache_shape, LIMITS), KeyedChances(), 8)
    requests = [
        make_request([0], seq_id=number, source=(1,) * 5, cache_salt=salt) for number, salt in enumerate(salts, 1)
    ]
    for request in requests:
        runner.begin(request)
    for expected in encoded:
        chains = runner.plan([(request, 1) for request in requests])
        assert draft.num_encoded == list(expected)
    assert len({chain.source for chain in chains}) == len(set(salts))
    assert len(chains) == 2


def test_rows_of_other_texts_delay_no_source() -> None:
    draft = TableModel(PAIR.draft, V, has_source=True)
    runner = DraftModelRunner(draft, ROOM(draft.cache_shape, LIMITS), KeyedChances(), 8)
    long = make_request([0] * 5, seq_id=1, source=(1,) * 2)
    other = make_request([0], seq_id=2, source=(1,) * 5)
    for request in (long, other):
        runner.begin(request)
    assert len(runner.plan([(long, 1), (other, 1)])) == 2
    assert sum(draft.num_encoded) == 7


def test_a_source_that_does_not_fit_costs_its_text_the_drafts() -> None:
    rig = draft_rig(TableModel(PAIR.draft, V, has_source=True, max_positions=12))
    (longer,) = rig.add((0,), SamplingParams(seed=1, max_tokens=8), "long", source=(1,) * LONGEST)
    (other,) = rig.add((0,), SamplingParams(seed=1, max_tokens=8), "short", source=(1,) * 5)
    rig.finish()
    drafted = [each.metrics.speculative_decoding.num_draft_tokens for each in (longer, other)]
    assert drafted[0] == 0
    assert drafted[1] > 0
    assert_no_source_is_left(rig)


class TroubleError(Exception):
    """An error of a draft model."""


class Failing(TableModel):
    """A model whose encoder fails for sources with a token, after its rows were reserved, and whose passes may fail."""

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        if 2 in batch.tokens.tolist():
            raise TroubleError
        return super().encode(batch, storage)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        if len(self.num_rows) % 3 == 2:
            self.num_rows.append(0)
            raise TroubleError
        return super().forward(batch, storage, taps)


def test_errors_of_a_draft_s_encoder_cost_drafts_alone() -> None:
    rig = draft_rig(Failing(PAIR.draft, V, has_source=True))
    rig.drafter_may_fail = True
    requests = add_all(rig)
    while rig.requests:
        rig.step()
        drafts_of(rig)
    assert results(requests) == alone()
    drafted = {request.source: request.metrics.speculative_decoding.num_draft_tokens for request in requests}
    assert all((drafted[source] == 0) == (2 in source) for source in SOURCES)
    assert rig.engine.metrics.drafter_errors > 0
    assert_no_source_is_left(rig)


# --- wrong sources are found


def take_another(sources: Sources, seq_id: int, original: Callable[..., Source | None]) -> Source | None:
    """Return the source of another text, if there is one."""
    other = next((each for holder, (_, each) in sources._held.items() if holder != seq_id), None)
    return other or original(sources, seq_id)


def share_by_first_token(
    sources: Sources, seq_id: int, tokens: Sequence[int], cache_salt: str, original: Callable[..., Source]
) -> Source:
    known = next((known for _, known in sources._by_key if known[0] == tokens[0]), tokens)
    return original(sources, seq_id, known, cache_salt)


def keep_all(sources: Sources, seq_id: int, original: Callable[..., None]) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "fault"), [("of", take_another), ("hold", share_by_first_token), ("release", keep_all)]
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    expected = alone()  # before the fault
    original = getattr(Sources, name)
    monkeypatch.setattr(Sources, name, lambda *args: fault(*args, original=original))
    rig = build_rig(encoder_decoder(), limits=LIMITS, cache=few_blocks(40))
    with pytest.raises(AssertionError):
        _expect(expected, rig)


def _expect(expected: Sequence[Any], rig: Rig) -> None:
    requests = add_all(rig)
    rig.finish()
    assert results(requests) == expected
