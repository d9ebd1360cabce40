"""Heads under settings and over several steps, their states of known prefixes, and one call that drafts for many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from speculant import plugins
from speculant.cache import paged_cache
from speculant.config import Limits
from speculant.drafting import HeadFolder, StaticTree, grow_chains
from speculant.kernels import NativeSampler
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.models import Chain, NativeDecoder, is_foreseeable
from speculant.models.native import decoder as native_decoder
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows
from tests.exactness.selection import slow_but
from tests.exactness.speculation import Case, assert_exact, enumerate_case
from tests.exactness.test_drafters import MODULES, head
from tests.exactness.test_native_chains import COUPLED, DISTRIBUTIONS, LIMITS, assert_same
from tests.exactness.test_native_decoder import make_native, tokens_of
from tests.examples import examples, sizes
from tests.fakes import build_rig, few_blocks, slotted
from tests.heads import WRITERS, write_eagle, write_eagle3
from tests.models import make_request
from tests.native import SETS

THREE_STATES = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
METHODS = (*WRITERS, MODULES)


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
    drafter = functools.partial(head(method), cache=blocks)
    for seed in range(examples(2, least=1)):
        case = Case(
            Pair(seed, 2 if method != "eagle3" else 3, FULL_SUPPORT), 2, params, "block", prompt=(0, 1), steps=steps,
            width=8, make_drafter=drafter, cache=blocks,
        )  # fmt: skip
        assert_exact(case)


def test_rows_of_a_prefix_are_taken_over() -> None:
    """A second request of the same prompt drafts as the first did, though no state of its prefix is computed."""
    pair, limits = Pair(3, 4, FULL_SUPPORT), Limits(40, 1, 32)
    drafter = head("eagle")(pair, KeyedChances(), limits, few_blocks(60))
    rig = build_rig(TableModel(pair.target, 4), drafter, length=3, limits=limits, cache=few_blocks(60))
    found = []
    for name in ("first", "second"):
        (request,) = rig.add((0, 1, 2, 3) * 5, SamplingParams(max_tokens=12, temperature=0), name)
        rig.finish()
        found.append((request.output, request.metrics.speculative_decoding.num_accepted_draft_tokens))
    assert found[0] == found[1]
    assert request.metrics.cached_tokens >= 16
    others = ([0, 1, 2, 3] * 5, ""), ([0, 1, 2, 3] * 5, "other"), ([1, 1, 2, 3, *[0, 1, 2, 3] * 4], "")
    held = list[int]()
    for seq_id, (tokens, salt) in enumerate(others, 100):
        late = make_request(tokens, seq_id=seq_id, cache_salt=salt)
        drafter.begin(late)
        drafter.observe(late, CommittedRows(18, tokens[18:19], hidden=(torch.zeros(1, 4),)))
        held.append(drafter.caches[0].length(seq_id))
    assert held == [16, 0, 0], "the first token and the salt count too"


def test_a_head_that_drafts_nothing_costs_no_prefix() -> None:
    """The target takes over all that it knows of the prompt."""
    pair, limits = Pair(3, 4, FULL_SUPPORT), Limits(40, 1, 32)
    drafter = head("eagle")(pair, KeyedChances(), limits, few_blocks(60))
    rig = build_rig(TableModel(pair.target, 4), drafter, length=0, limits=limits, cache=few_blocks(60))
    for name in ("first", "second"):
        (request,) = rig.add((0, 1, 2, 3) * 5, SamplingParams(max_tokens=12, temperature=0), name)
        rig.finish()
    assert request.metrics.cached_tokens >= 16


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
            enumerate_case(case(make_drafter=functools.partial(head(method, shape), cache=slotted)))
            for shape in (None, [1, 1])
        )
        assert chain.tokens.keys() == tree.tokens.keys()
        for text, probability in chain.tokens.items():
            assert tree.tokens[text] == pytest.approx(probability, abs=1e-12)
    assert StaticTree.of_widths([1, 1]).depth == 2
