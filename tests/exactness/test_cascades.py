"""A cascade's drafts are those of its draft model alone, bit for bit, whatever its inner drafter guesses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from speculant.cache import CacheShape, KVCache, KVStorage, paged_cache, slotted_cache
from speculant.drafting import (
    CascadeDrafter,
    Drafter,
    DrafterContext,
    DrafterNeeds,
    DrafterReads,
    DraftModelRunner,
    ModelDrafter,
    StaticTree,
    SubDrafter,
    build_sub_drafter,
)
from speculant.kernels import REFERENCE, NativeSampler, Sampler
from speculant.models import Batch, CausalLM, Chain, Hidden, NativeDecoder
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances, mix
from speculant.types import CommittedRows, DraftTree, Request
from tests.automata import Automaton
from tests.examples import sizes
from tests.fakes import ScriptedDrafter, drafter_context
from tests.models import make_request
from tests.small_models import MODELS, make_model

V, TARGET_V, LENGTH = 96, 100, 6  # the target's head is padded
ROUNDS = 7
ENDS = frozenset({3, 95})
AUTOMATON = Automaton({0: dict.fromkeys(range(60), 1), 1: dict.fromkeys(range(30, TARGET_V), 0)})
TEXT = [7, 8, 9, 7, 8, 9, 11, 7, 8]
KINDS: dict[str, tuple[dict[str, Any], bool]] = {  # sampling parameters, and whether noise is shared
    "greedy": ({"temperature": 0}, True),
    "seeded": ({"temperature": 0.9, "seed": 5}, True),
    "ratio": ({"temperature": 1.2, "top_p": 0.9}, False),
    "penalised": ({"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {5: 2.0}}, False),
    "penalised greedy": ({"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.9}, True),
    "ends": ({"min_tokens": 7, "top_k": 9, "logit_bias": {3: 9.0}}, False),
}


class Counted:
    """A model that counts its passes; a chain is drawn by itself alone where `at_once`."""

    def __init__(self, model: CausalLM, at_once: bool = True) -> None:
        self.model, self.at_once, self.passes = model, at_once, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        self.passes += 1
        return self.model.forward(batch, storage, taps)

    def grow(self, chains: Sequence[Chain], cache: KVCache, vocab_size: int) -> Sequence[Chain]:
        return self.model.grow(chains, cache, vocab_size) if self.at_once else chains


def sampler_of(model: CausalLM) -> Sampler:
    return NativeSampler(model.kernels) if isinstance(model, NativeDecoder) else REFERENCE


def cache_of(shape: CacheShape, kind: str) -> KVCache:
    return paged_cache(shape, 120, 4) if kind == "paged" else slotted_cache(shape, 12, 96)


def model_alone(model: Any, kind: str, topology: StaticTree | None = None, budget: int = 256) -> ModelDrafter:
    chances, cache = KeyedChances(sampler_of(make_model(model.name))), cache_of(model.cache_shape, kind)
    runner = DraftModelRunner(model, cache, chances, budget)
    return ModelDrafter(runner, TARGET_V, sampler_of(make_model(model.name)), topology)


def counted(name: str, at_once: bool = True) -> Any:
    made = Counted(make_model(name), at_once)
    made.name = name  # type: ignore[attr-defined]
    return made


def context_of(name: str, budget: int) -> DrafterContext:
    return drafter_context(TARGET_V, sampler=sampler_of(make_model(name)), budget=budget)


class Failing(ScriptedDrafter):
    """Guesses every second time, and raises in between."""

    calls = 0

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("no guess")
        return super().propose(requests, limits)


def pseudo_random(request: Request) -> DraftTree | Sequence[int]:
    """Return tokens that are hardly ever drawn, beyond the draft's vocabulary too."""
    return [mix(len(request.tokens), place) % TARGET_V for place in range(LENGTH)]


def lookup(name: str) -> Drafter:
    return build_sub_drafter(context_of(name, 256), None).drafter


INNERS: dict[str, Callable[[str], Drafter]] = {
    "lookup": lookup,
    "model": lambda name: model_alone(counted(name), "paged"),
    "tree": lambda name: model_alone(counted(name), "slotted", StaticTree.of_widths([2, 2, 1])),
    "wrong": lambda name: ScriptedDrafter(pseudo_random),
    "nothing": lambda name: ScriptedDrafter(lambda request: []),
    "failing": lambda name: Failing(lambda request: [7, 8, 9]),
}


def cascade_of(name: str, inner: Drafter, kind: str = "paged", budget: int = 256) -> CascadeDrafter:
    model, context = counted(name), context_of(name, budget)
    runner = DraftModelRunner(model, cache_of(model.cache_shape, kind), context.chances, budget)
    return CascadeDrafter(runner, SubDrafter("inner", inner, 4), context)


def requests_of(constrained: bool = True) -> list[Request]:
    """Make one request of each kind; the last one of them is constrained."""
    made = []
    for seq_id, (params, shared_noise) in enumerate(KINDS.values()):
        prompt, output = TEXT[seq_id % 3 :] * 2, TEXT[: seq_id % 4]
        shape: dict[str, Any] = {"end_token_ids": ENDS, "shared_noise": shared_noise}
        made.append(make_request(prompt, output, SamplingParams(**params), seq_id, **shape))
    for seq_id, shared_noise in enumerate((True, False), len(made)) if constrained else ():
        request = make_request(TEXT, (), SamplingParams(), seq_id, shared_noise=shared_noise)
        request.constraint = AUTOMATON.constrain()
        made.append(request)
    return made


def commit(drafter: Drafter, request: Request, tree: DraftTree, round_: int) -> None:
    """Accept a part of a draft and add a token, as a verifier would; both runs decide alike."""
    kept = tree.token_list[: mix(request.seq_id, round_) % (tree.size + 1)]
    tokens = [*kept, _next_token(request, kept, round_)]
    start = len(request.tokens) - 1
    request.extend(tokens)
    request.rounds += 1
    if request.constraint is not None:
        request.constraint.advance(tokens)
    drafter.observe(request, CommittedRows(start, request.tokens[start:-1], tokens))


def _next_token(request: Request, kept: Sequence[int], round_: int) -> int:
    allowed: Sequence[int] = range(V)
    if request.constraint is not None:
        allowed = sorted(token for token in AUTOMATON.allowed_after([*request.output, *kept]) if token < V)
    return allowed[mix(round_, request.seq_id, len(kept)) % len(allowed)]


@torch.inference_mode()
def drafts(drafter: Drafter, requests: Sequence[Request], rounds: int = ROUNDS) -> list[DraftTree]:
    """Run requests for some rounds, all in one batch; return every draft."""
    made = []
    for request in requests:
        drafter.begin(request)
    for round_ in range(rounds):
        limits = [mix(9, round_, request.seq_id) % (LENGTH + 1) for request in requests]
        trees = drafter.propose(requests, limits)
        for cache in drafter.caches:
            cache.check()
        assert all(tree.size <= limit for tree, limit in zip(trees, limits, strict=True))
        for request, tree in zip(requests, trees, strict=True):
            commit(drafter, request, tree, round_)
        made += trees
    return made


def assert_identical(name: str, trees: Sequence[DraftTree], expected: Sequence[DraftTree]) -> None:
    """Assert the same tokens and probs; only torch's kernels may differ in a last bit with the number of rows."""
    assert [tree.token_list for tree in trees] == [tree.token_list for tree in expected]
    for tree, other in zip(trees, expected, strict=True):
        assert tree.is_chain
        assert (tree.probs is None) == (other.probs is None)
        if tree.probs is not None and other.probs is not None:
            torch.testing.assert_close(tree.probs, other.probs, rtol=0, atol=1e-14 if name == MODELS[0] else 0)


@functools.cache
def expected_drafts(name: str) -> tuple[DraftTree, ...]:
    return tuple(drafts(model_alone(counted(name), "paged"), requests_of()))


@pytest.mark.covering(1)
@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("kind", ["paged", "slotted"])
@pytest.mark.parametrize("name", [*MODELS[:6], *MODELS[-5:-3]])
def test_a_cascade_drafts_the_tokens_of_its_model(name: str, kind: str, inner: str) -> None:
    """Greedy, seeded and ratio, penalties, constraints: the same tokens from the same probs, bit for bit."""
    cascade, expected = cascade_of(name, INNERS[inner](name), kind), expected_drafts(name)
    assert_identical(name, drafts(cascade, requests_of()), expected)
    assert sum(tree.size for tree in expected) > 100
    assert bool(cascade.errors) == (inner == "failing")


@pytest.mark.parametrize("name", MODELS[:2])
def test_cascade_good_guesses_save_passes(name: str) -> None:
    """An inner drafter that is the draft model itself leaves one pass per draft of a greedy or seeded request."""
    kinds = [request for request in requests_of(constrained=False) if request.drafts.shared_noise]
    passes = {}
    for inner in ("model", "tree", "nothing"):
        cascade = cascade_of(name, INNERS[inner](name))
        for request in kinds:
            cascade.begin(request)
        with torch.inference_mode():
            cascade.propose(kinds, [LENGTH] * len(kinds))
        passes[inner] = cascade.guarded[0].drafter._runner.model.passes  # type: ignore[attr-defined]
    assert passes["tree"] in range(2, LENGTH), "a branch behind others is kept"
    assert passes == passes | {"model": 1, "nothing": LENGTH}


@pytest.mark.parametrize("budget", sizes(5, 11))
def test_cascade_with_a_small_budget_drafts_the_same(budget: int) -> None:
    name = MODELS[0]
    alone = drafts(model_alone(counted(name), "paged", budget=budget), requests_of(), rounds=20)
    assert_identical(name, drafts(cascade_of(name, lookup(name), budget=budget), requests_of(), rounds=20), alone)
    assert any(tree.size for tree in alone)


def test_cascade_leaves_no_guess_in_the_cache() -> None:
    """The cache holds the committed tokens and the drafted ones but the last, as the draft model's would."""
    for inner in INNERS:
        cascade, requests = cascade_of(MODELS[0], INNERS[inner](MODELS[0])), requests_of(constrained=False)
        for request in requests:
            cascade.begin(request)
        with torch.inference_mode():
            trees = cascade.propose(requests, [LENGTH] * len(requests))
        for request, tree in zip(requests, trees, strict=True):
            assert cascade.caches[0].length(request.seq_id) == len(request.tokens) + tree.size - 1
            cascade.end(request)
        assert all(cache.free_tokens() == cache.num_blocks * cache.block_size for cache in cascade.caches)


def test_cascade_announces_its_inner_drafter_s_needs() -> None:
    own = DrafterNeeds(hidden_layers=(1,), reads=DrafterReads(3, target_cache=True, encoder=True, prediction=True))
    needs = cascade_of(MODELS[0], ScriptedDrafter(lambda request: [], own)).needs
    assert (needs.hidden_layers, needs.reads) == (own.hidden_layers, own.reads)
    assert (needs.emits_probs, needs.emits_tree, needs.own_cache) == (True, False, True)
