"""Heads keep the output's distribution under every rule, and one call drafts the same bits as many."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant import plugins
from speculant.cache import paged_cache
from speculant.config import Limits
from speculant.drafting import Drafter, HeadFolder, StaticTree, grow_chains
from speculant.kernels import NativeSampler
from speculant.lab.exactness import EXACT, FULL_SUPPORT, Pair, TableModel
from speculant.models import Chain, NativeDecoder, is_foreseeable
from speculant.models.native import decoder as native_decoder
from speculant.params import SamplingParams
from speculant.sampling import Chances, KeyedChances
from tests.exactness.selection import combinations, slow_but
from tests.exactness.speculation import Case, enumerate_case
from tests.exactness.test_native_chains import COUPLED, DISTRIBUTIONS, LIMITS, assert_same
from tests.exactness.test_native_decoder import SETS, make_native, tokens_of
from tests.examples import examples, sizes
from tests.fakes import MakeCache, build_rig, drafter_context, few_blocks, known_verifiers, slotted
from tests.heads import WRITERS, write_dflash, write_eagle, write_eagle3, write_mtp, write_peagle
from tests.models import make_request

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 5}
THREE_STATES = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
TREES: dict[str, Any] = {"two deep": [2, 1], "uneven": [[0], [1], [0, 0]]}
MODULES = "mtp of two modules"
METHODS = (*WRITERS, MODULES)
VERIFIERS = [name for name, verifier in known_verifiers().items() if verifier.lossless]
BRANCHING = [name for name in VERIFIERS if known_verifiers()[name].needs.branches]


@functools.cache
def folder_of(method: str, vocab_size: int) -> str:
    """Write a head for a table model, whose states are the logits."""
    folder = Path(tempfile.mkdtemp(prefix="heads-"))
    if method == "eagle":
        return write_eagle(folder, vocab_size, vocab_size, **SMALL)
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}
    if method == "eagle3":
        known = vocab_size - 1 if vocab_size > 3 else None
        return write_eagle3(folder, vocab_size, vocab_size, draft_vocab=known, **SMALL, **layers)
    if method == "peagle":
        return write_peagle(folder, vocab_size, vocab_size, ptd_token_id=1, **SMALL, **layers)
    if method == "dflash":
        blocks = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1, 0]}, "block_size": 4}
        return write_dflash(folder, vocab_size, vocab_size, **SMALL, **blocks)
    if method == MODULES:
        return write_mtp(folder, vocab_size, vocab_size, modules=2)
    return WRITERS[method](folder, vocab_size, vocab_size)


def make(
    method: str, tree: Any, pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted, budget: int = 64
) -> Drafter:
    target = TableModel(pair.target, pair.vocab_size)
    context = drafter_context(
        pair.vocab_size, {"tree": tree} if tree is not None else {}, folder_of(method, pair.vocab_size),
        make_cache=lambda shape: cache(shape, limits), target=target, chances=chances, budget=budget,
    )  # fmt: skip
    drafter: Drafter = plugins.load("speculant.drafting", method.split()[0]).build(context)
    return drafter


def assert_exact(case: Case) -> float:
    found = enumerate_case(case)
    assert found.deviation() <= EXACT, case
    return found.mean_accepted


@pytest.mark.covering(1)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("method", METHODS)
def test_chains_keep_the_distribution(method: str, verifier: str) -> None:
    """States are the logits of tables; only tables with full support have finite logits, like a model's."""
    tree = "chain" if method == "medusa" else None
    for vocab_size in ((4, 3) if method == "eagle3" else (3, 4))[: examples(2, least=1)]:
        for seed in range(examples(3, least=1)):
            drafter, pair = functools.partial(make, method, tree), Pair(seed, vocab_size, FULL_SUPPORT)
            case = Case(pair, 2, verification=verifier, prompt=(0, 1), width=8, make_drafter=drafter)
            assert assert_exact(case) > 0.1


QUICK_TREES = {  # one head that drafts step by step, and one that drafts in one pass
    ("eagle3", "uneven", "traversal"),
    ("peagle", "uneven", "multi_draft"),
}


@pytest.mark.parametrize(
    ("method", "name", "verifier"),
    combinations(
        lambda *each: each in QUICK_TREES, ["medusa", "eagle", "eagle3", "peagle", "dflash", "mtp"], TREES, BRANCHING
    ),
)
def test_trees_keep_the_distribution(method: str, name: str, verifier: str) -> None:
    for seed in range(examples(3, least=1)):
        drafter, pair = functools.partial(make, method, TREES[name]), Pair(seed, 4 if seed else 3, FULL_SUPPORT)
        case = Case(pair, 4, verification=verifier, prompt=(0, 1), width=8, make_drafter=drafter)
        assert assert_exact(case) > 0.1


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        *slow_but([("eagle", 2), ("medusa", 2)], ((method, 2) for method in METHODS)),
        ("eagle3", 1),  # it needs three tokens, and two steps of that take long
    ],
)
def test_transforms_and_several_steps(method: str, steps: int) -> None:
    """Penalties see each node's own drafted ancestors; later steps draft from states of accepted drafts too."""
    params = SamplingParams(max_tokens=None, temperature=0.8, top_p=0.9173, frequency_penalty=0.4)
    blocks = few_blocks(40, keep_prefixes=False)
    tree = "chain" if method == "medusa" else None
    drafter = functools.partial(make, method, tree, cache=blocks)
    for seed in range(examples(2, least=1)):
        case = Case(
            Pair(seed, 2 if method != "eagle3" else 3, FULL_SUPPORT), 2, params, "block", prompt=(0, 1), steps=steps,
            width=8, make_drafter=drafter, cache=blocks,
        )  # fmt: skip
        assert_exact(case)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_without_a_head(method: str, tight: bool) -> None:
    """Greedy and seeded, several at a time, prompts in chunks, prefix hits, and preempted where memory is short."""
    pair, limits = Pair(3, 4, FULL_SUPPORT), Limits(40, 3, 6)
    params = [SamplingParams(max_tokens=16, temperature=0 if i % 2 else 1.3, seed=i) for i in range(6)]
    prompts = [(0, 1, 2, 3) * 3, (0, 1, 2, 3) * 3, (1, 2), (0, 1, 2, 3) * 2 + (1,), (3,), (2, 2, 2)]
    cache = few_blocks(11 if tight else 60)
    texts, accepted, preempted = list[list[list[int]]](), 0, 0
    for drafting in (False, True):
        drafter = make(method, None, pair, KeyedChances(), limits, cache) if drafting else None
        rig = build_rig(TableModel(pair.target, 4), drafter, length=3, limits=limits, cache=cache)
        requests = [
            rig.add(prompt, each, str(i))[0] for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]
        rig.finish()
        texts.append([request.output for request in requests])
        accepted = sum(request.metrics.speculative_decoding.num_accepted_draft_tokens for request in requests)
        preempted = rig.engine.metrics.preemptions
    assert texts[0] == texts[1]
    assert accepted > 5
    assert (preempted > 0) == tight


def test_rows_of_a_prefix_are_taken_over() -> None:
    """A second request of the same prompt drafts as the first did, though no state of its prefix is computed."""
    pair, limits = Pair(3, 4, FULL_SUPPORT), Limits(40, 1, 32)
    drafter = make("eagle", None, pair, KeyedChances(), limits, few_blocks(60))
    rig = build_rig(TableModel(pair.target, 4), drafter, length=3, limits=limits, cache=few_blocks(60))
    found = []
    for name in ("first", "second"):
        (request,) = rig.add((0, 1, 2, 3) * 5, SamplingParams(max_tokens=12, temperature=0), name)
        rig.finish()
        found.append((request.output, request.metrics.speculative_decoding.num_accepted_draft_tokens))
    assert found[0] == found[1]
    assert request.metrics.cached_tokens >= 16
    assert drafter.match_prefix(make_request([0, 1, 2, 3] * 5)) >= 16
    others = make_request([0, 1, 2, 3] * 5, cache_salt="other"), make_request([1, 1, 2, 3, *[0, 1, 2, 3] * 4])
    assert [drafter.match_prefix(each) for each in others] == [0, 0], "the first token and the salt count too"


native = pytest.mark.skipif(not SETS, reason="the native kernels are not built")
HEADS: dict[str, Callable[[Path], str]] = {
    "eagle": lambda at: write_eagle(at, 32, 96),
    "eagle without bias": lambda at: write_eagle(at, 32, 96, bias=False),
    "eagle3": lambda at: write_eagle3(at, 32, 96, **THREE_STATES),
    "eagle3 short": lambda at: write_eagle3(at, 32, 96, draft_vocab=40, **THREE_STATES),
    "eagle3 norms": lambda at: write_eagle3(at, 32, 96, norm_before_residual=True, norm_output=True, **THREE_STATES),
}


@torch.inference_mode()
def grown(name: str, folder: str, shared_noise: Sequence[bool], dtype: torch.dtype) -> list[Chain]:
    """Grow five chains in one call, each after rows of random states."""
    target = make_native(dtype=dtype)
    model = plugins.load("speculant.drafting", name.split()[0]).load(HeadFolder.open(folder, name.split()[0]), target)
    model = model[0] if isinstance(model, tuple) else model
    assert isinstance(model, NativeDecoder)
    cache, chances = paged_cache(model.cache_shape, 100, 4), KeyedChances(NativeSampler(model.kernels))
    made, generator = [], torch.Generator().manual_seed(1)
    for seq_id, (distribution, limit, shares) in enumerate(zip(DISTRIBUTIONS, LIMITS, shared_noise, strict=True)):
        tokens = tokens_of(seq_id)[: 5 + 3 * seq_id]
        request = make_request(tokens, params=SamplingParams(**distribution), seq_id=seq_id, shared_noise=shares)  # type: ignore[arg-type]
        states = torch.randn(len(tokens) - 1, 32, generator=generator)
        made.append(Chain(request, tokens[1:], limit, chances.draft(request), hidden=states))
    grow_chains(model, made, cache, 96, NativeSampler(model.kernels))
    cache.check()
    return made


@pytest.mark.covering(1)
@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_noise", COUPLED)
@pytest.mark.parametrize("name", HEADS)
def test_one_call_is_many(
    tmp_path: Path, name: str, shared_noise: list[bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HEADS[name](tmp_path / "head")
    at_once = grown(name, folder, shared_noise, dtype)
    assert all(map(is_foreseeable, at_once))
    monkeypatch.setattr(native_decoder, "is_foreseeable", lambda chain: False)
    stepwise = grown(name, folder, shared_noise, dtype)
    assert_same(at_once, stepwise)
    assert [len(chain.tokens) for chain in at_once] == LIMITS


@pytest.mark.parametrize("vocab_size", sizes(3, 4))
def test_a_tree_of_one_token_each_is_the_chain(vocab_size: int) -> None:
    """A tree's pass computes the whole tree again; a chain's goes on from its cache."""
    pair = Pair(2, vocab_size, FULL_SUPPORT)
    case = functools.partial(
        Case, pair, 2, SamplingParams(max_tokens=None, temperature=0.9), "multi_draft", prompt=(0, 1), width=8
    )
    for method in ("eagle", "eagle3")[: examples(2, least=1)]:
        chain, tree = (
            enumerate_case(case(make_drafter=functools.partial(make, method, shape))) for shape in (None, [1, 1])
        )
        assert chain.tokens.keys() == tree.tokens.keys()
        for text, probability in chain.tokens.items():
            assert tree.tokens[text] == pytest.approx(probability, abs=1e-12)
    assert StaticTree.of_widths([1, 1]).depth == 2
