"""A tree in one native call is the tree drawn level by level: the same nodes from the same probs, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import plugins
from speculant.cache import paged_cache, slotted_cache
from speculant.drafting import DraftModelRunner, DynamicTree, HeadFolder, HiddenStateRunner, ModelDrafter, read_tree
from speculant.kernels import NativeSampler
from speculant.models import NativeDecoder
from speculant.models.native import decoder as native_decoder
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from tests.automata import Automaton
from tests.exactness.test_heads import HEADS
from tests.exactness.test_native_decoder import VARIANTS, make_decoder, make_native, packed, tokens_of
from tests.models import make_request
from tests.native import SETS, needs_kernels

pytestmark = needs_kernels

SHAPES: dict[str, Any] = {
    "wide": [3, 2, 1, 1],
    "chain": [1] * 5,
    "one level": [4],
    "uneven": [[0], [1], [2], [0, 0], [1, 0], [1, 1], [0, 0, 0], [0, 0, 0, 0], [1, 1, 0]],
}
ENDS = frozenset({3, 95})
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 2},  # fewer tokens than the widest node has children
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.9},
    {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 1.5, "frequency_penalty": -0.4, "min_tokens": 9},
    {"temperature": 0.5, "logit_bias": {3: 30.0, 40: -float("inf")}, "min_tokens": 8},
]
LIMITS = [30, 7, 1, 21, 9, 4, 12, 0]  # 0 = it is not drafted for
SHARED = {"shared": [True] * 8, "ratio": [False] * 8, "mixed": [True, False] * 4}
CACHES = {"slotted": lambda shape: slotted_cache(shape, 12, 96), "paged": lambda shape: paged_cache(shape, 200, 4)}


def load_head(name: str, folder: str, target: NativeDecoder) -> NativeDecoder:
    model = plugins.load("speculant.drafting", name.split()[0]).load(HeadFolder.open(folder, name.split()[0]), target)
    model = model[0] if isinstance(model, tuple) else model
    assert isinstance(model, NativeDecoder)
    return model


def make_drafter(model: NativeDecoder, tree: Any, kind: str, vocab_size: int, head: bool, budget: int) -> ModelDrafter:
    cache, sampler = CACHES[kind](model.cache_shape), NativeSampler(model.kernels)
    cache.reserve(99, 3)
    shape = tree if isinstance(tree, DynamicTree) else read_tree(tree)
    if head:
        runner: DraftModelRunner = HiddenStateRunner(
            model, cache, KeyedChances(sampler), budget, 0.0, lambda states: states[0]
        )
    else:
        runner = DraftModelRunner(model, cache, KeyedChances(sampler), budget)
    return ModelDrafter(runner, vocab_size, sampler, shape)


def make_requests(shared: Sequence[bool]) -> list[Request]:
    made = []
    for seq_id, (settings, shares) in enumerate(zip(PARAMS, shared, strict=True)):
        tokens, params = tokens_of(seq_id)[: 9 + 3 * seq_id], SamplingParams(**settings)
        of = {"seq_id": seq_id, "shared_noise": shares, "end_token_ids": ENDS}
        made.append(make_request(tokens[:-4], tokens[-4:], params, **of))
    return made


def observe(drafter: ModelDrafter, request: Request, start: int) -> None:
    """Give a head random states of the tokens from a position on; other drafters need none."""
    count = len(request.tokens) - 1 - start
    generator = torch.Generator().manual_seed(1000 * request.seq_id + start)
    if isinstance(drafter._runner, HiddenStateRunner):
        states = torch.randn(count, 32, generator=generator)
        drafter._runner.observe(request, CommittedRows(start, request.tokens[start:-1], (), (states,)))


@torch.inference_mode()
def drafted(drafter: ModelDrafter, requests: Sequence[Request], rounds: int = 2) -> list[DraftTree]:
    """Draft for all, several times. After each round two nodes of each draft and one other token are committed."""
    trees, begun = list[DraftTree](), [0] * len(requests)
    for request in requests:
        drafter.begin(request)
    for _ in range(rounds):
        for place, request in enumerate(requests):
            observe(drafter, request, begun[place])
            begun[place] = len(request.tokens) - 1
        made = drafter.propose(requests, LIMITS[: len(requests)])
        for request, tree, limit in zip(requests, made, LIMITS, strict=False):
            held = drafter.caches[0].length(request.seq_id)
            head = isinstance(drafter._runner, HiddenStateRunner)
            whole = drafter._topology is None or (isinstance(drafter._topology, DynamicTree) and tree.scores is None)
            assert whole or not limit or held <= len(request.tokens) - head, "a node was left"
            path = tree.tokens_to(tree.size - 1)[:2] if tree.size else []
            request.extend([*path, 5])
            request.rounds += 1
        drafter.caches[0].check()
        trees += made
    return trees


def assert_same(some: Sequence[DraftTree], others: Sequence[DraftTree]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.token_list, one.parent_list) == (other.token_list, other.parent_list)
        assert (one.probs is None) == (other.probs is None)
        assert one.scores == (other.scores if other.scores is None else pytest.approx(other.scores, rel=1e-9))
        if one.probs is not None and other.probs is not None:
            assert torch.equal(one.probs, other.probs)


def assert_one_call_is_many(
    make: Callable[[], ModelDrafter], shared: Sequence[bool], monkeypatch: pytest.MonkeyPatch
) -> list[DraftTree]:
    calls = list[int]()
    run = native_decoder.Kernels.draft
    monkeypatch.setattr(native_decoder.Kernels, "draft", lambda *each: (calls.append(1), run(*each))[1])
    at_once = drafted(make(), make_requests(shared))
    assert len(calls) == 2, "one call a round"
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    stepwise = drafted(make(), make_requests(shared))
    assert len(calls) == 2
    assert_same(at_once, stepwise)
    return stepwise


@pytest.mark.covering(1)
@pytest.mark.parametrize("vocab_size", [96, 80, 130])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("tree", SHAPES)
@pytest.mark.parametrize("isa", SETS)
def test_a_tree_in_one_call_is_many(
    isa: str, tree: str, kind: str, shared: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_native(isa)
    make = functools.partial(make_drafter, model, SHAPES[tree], kind, vocab_size, False, 256)
    trees = assert_one_call_is_many(make, SHARED[shared], monkeypatch)
    shape = read_tree(SHAPES[tree])
    assert shape is not None
    for draft, limit in zip(trees, LIMITS * 2, strict=True):
        assert draft.size <= min(limit, shape.most_nodes)
    expected = shape.most_nodes if SHARED[shared][0] else shape.depth
    assert trees[0].size == expected, "a greedy tree has all nodes, or without shared noise one token at each depth"


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tree", SHAPES)
@pytest.mark.parametrize("name", HEADS)
def test_a_heads_tree_in_one_call_is_many(
    tmp_path: Path, name: str, tree: str, shared: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = make_native(dtype=dtype), HEADS[name](tmp_path / "head")
    model = load_head(name, folder, target)
    make = functools.partial(make_drafter, model, SHAPES[tree], "paged", 96, True, 256)
    trees = assert_one_call_is_many(make, SHARED[shared], monkeypatch)
    assert sum(draft.size for draft in trees) > 30


OTHERS: dict[str, dict[str, Any]] = {
    "windows": {"windows": (None, 10)},
    "experts": VARIANTS["experts"],
    "short head": {"head_tokens": tuple(range(1, 96, 3))},
    "large vocabulary": {"vocab_size": 9000},  # several chunks of a distribution
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("budget", [40, 60])
@pytest.mark.parametrize("variant", OTHERS)
def test_other_models_and_backlogs_in_one_call(
    variant: str, budget: int, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small budget leaves some requests with a backlog, and some without input."""
    model = make_native(**OTHERS[variant])
    make = functools.partial(make_drafter, model, SHAPES["wide"], "paged", model.vocab_size, False, budget)
    assert_one_call_is_many(make, SHARED[shared], monkeypatch)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_node_where_the_model_fails_has_no_children(
    at_once: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its siblings and the other requests keep theirs, and later draws of its request are the same on both ways."""
    healthy = drafted(make_drafter(make_native(), [3, 2, 1], "paged", 96, False, 256), make_requests([shared] * 8), 1)
    poison = healthy[1].token_list[1]
    decoder = make_decoder()
    decoder.model.embed_tokens.weight[poison] = torch.nan
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: at_once)
    requests = [each for each in make_requests([shared] * 8) if poison not in each.tokens]
    failing = drafted(
        make_drafter(packed(decoder, make_native().kernels), [3, 2, 1], "paged", 96, False, 256), requests, 1
    )
    tree = failing[[request.seq_id for request in requests].index(1)]
    assert poison in tree.token_list
    assert all(not tree.has_children(node) for node, token in enumerate(tree.token_list) if token == poison)
    assert tree.children(0), "its sibling"
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: not at_once)
    model = packed(decoder, make_native().kernels)
    again = [each for each in make_requests([shared] * 8) if poison not in each.tokens]
    assert_same(failing, drafted(make_drafter(model, [3, 2, 1], "paged", 96, False, 256), again, 1))


@pytest.mark.parametrize("shared", [True, False])
def test_a_constrained_tree_is_drawn_beside_others(shared: bool) -> None:
    """Level by level, because its mask depends on the tokens drawn; its neighbours are drawn in one call."""
    model = make_native()
    make = functools.partial(make_drafter, model, [2, 1], "paged", 96, False, 256)
    plain = drafted(make(), make_requests([shared] * 8), 1)
    requests = make_requests([shared] * 8)
    requests[0].constraint = Automaton({0: {7: 1, 8: 1}, 1: {60: 2}, 2: {}}).constrain()
    beside = drafted(make(), requests, 1)
    assert sorted(beside[0].token_list) in ([7, 8, 60, 60], [7, 60], [8, 60])
    assert_same(beside[1:], plain[1:])


def test_a_tree_of_one_token_each_is_the_chain() -> None:
    model = make_native()
    for shared in (True, False):
        tree, chain = (
            drafted(make_drafter(model, shape, "paged", 96, False, 256), make_requests([shared] * 8))
            for shape in ([1] * 30, None)
        )
        assert_same(tree, chain)


DYNAMIC = {
    "usual": DynamicTree(),
    "wide": DynamicTree(6, 3),
    "narrow": DynamicTree(2, 6),
    "one level": DynamicTree(5, 1),
}


def assert_reranked(draft: DraftTree) -> None:
    """The best node first, and a parent before its children."""
    assert draft.scores is not None
    confidences = list[float]()
    for parent, score in zip(draft.parent_list, draft.scores, strict=True):
        assert 0 < score <= 1
        confidences.append(score * (1 if parent < 0 else confidences[parent]))
    assert confidences == sorted(confidences, reverse=True)
    assert len(set(zip(draft.parent_list, draft.token_list, strict=True))) == draft.size, "siblings differ"


@pytest.mark.covering(1)
@pytest.mark.parametrize("vocab_size", [96, 80, 130])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("tree", DYNAMIC)
@pytest.mark.parametrize("isa", SETS)
def test_a_dynamic_tree_in_one_call_is_many(
    isa: str, tree: str, kind: str, shared: str, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without shared noise get chains, in a call of their own."""
    model, shares = make_native(isa), SHARED[shared]
    make = functools.partial(make_drafter, model, DYNAMIC[tree], kind, vocab_size, False, 256)
    at_once = drafted(make(), make_requests(shares))
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(at_once, drafted(make(), make_requests(shares)))
    for draft, limit, shared_noise in zip(at_once, LIMITS * 2, list(shares) * 2, strict=True):
        assert draft.size <= min(limit, DYNAMIC[tree].most_nodes)
        if shared_noise and draft.size:
            assert_reranked(draft)
        assert shared_noise or (draft.is_chain and draft.size <= DYNAMIC[tree].depth)
    if shares[0]:
        assert at_once[0].size == min(30, DYNAMIC[tree].most_nodes), "a greedy tree has all nodes that it may have"


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("tree", DYNAMIC)
@pytest.mark.parametrize("name", HEADS)
def test_a_heads_dynamic_tree_in_one_call_is_many(
    tmp_path: Path, name: str, tree: str, shared: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder, shares = make_native(dtype=dtype), HEADS[name](tmp_path / "head"), SHARED[shared]
    model = load_head(name, folder, target)
    make = functools.partial(make_drafter, model, DYNAMIC[tree], "paged", 96, True, 256)
    at_once = drafted(make(), make_requests(shares))
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    assert_same(at_once, drafted(make(), make_requests(shares)))


def test_a_dynamic_tree_of_two_depths_is_the_full_tree() -> None:
    """With room for every node, all are kept; a smaller draft of the same tree has the best ones."""
    model = make_native()
    full, dynamic = (
        drafted(make_drafter(model, shape, "paged", 96, False, 256), make_requests([True] * 8)[:2], 1)
        for shape in ([4, 4], DynamicTree(4, 2))
    )
    nodes, kept = ({tuple(of[0].tokens_to(node)) for node in range(of[0].size)} for of in (full, dynamic))
    assert kept == nodes
    assert dynamic[1].size == LIMITS[1]
