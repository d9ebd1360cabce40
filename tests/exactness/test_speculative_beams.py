"""Beam search with a draft model: the same beams and scores as without, to the last bit, in fewer target passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.config import Limits
from speculant.drafting.base import DrafterNeeds
from speculant.drafting.topology import StaticTree
from speculant.errors import RequestError
from speculant.kernels.native import usable_sets
from speculant.lab.exactness.tables import FULL_SUPPORT, Pair, Table, TableModel
from speculant.types import DraftTree, Request
from tests.exactness.searches import (
    CROWD_ENDS,
    CROWDED,
    add_crowd,
    one_at_a_time,
    searched,
    told,
    wide,
)
from tests.exactness.selection import slow_but
from tests.exactness.test_identity import PROMPTS
from tests.examples import examples
from tests.fakes import (
    MakeCache,
    Rig,
    ScriptedDrafter,
    both_caches,
    build_rig,
    few_blocks,
    model_drafter,
    paged,
    slotted,
)

ROOMY = Limits(max_model_len=40, max_num_seqs=1, max_num_batched_tokens=128)


def drafts_for(pair: Pair) -> dict[str, Table]:
    """Return draft models that know the target, know something of it, err, and are sure of the wrong token."""
    return {
        "equal": pair.target,
        "near": pair.draft,
        "other": Pair(pair.seed + 100, pair.vocab_size).target,
        "stubborn": lambda history: [9.0 * (token == history[-1]) for token in range(pair.vocab_size)],
    }


def rig_with(
    pair: Pair, draft: Table, length: int, limits: Limits = ROOMY, ends: frozenset[int] = frozenset(), **rest: Any
) -> Rig:
    vocab_size = pair.vocab_size
    drafter = model_drafter(TableModel(draft, vocab_size), vocab_size, limits=limits, cache=rest.get("cache", paged))
    rig = build_rig(TableModel(pair.target, vocab_size), drafter, length=length, limits=limits, ends=ends, **rest)
    rig.expected = RequestError
    return rig


def plainly(pair: Pair, params: SamplingParams, ends: frozenset[int] = frozenset()) -> list[Request]:
    rig = build_rig(TableModel(pair.target, pair.vocab_size), limits=ROOMY, ends=ends)
    rig.expected = RequestError
    return searched(rig, params)


def passes(requests: Sequence[Request]) -> int:
    return requests[0].metrics.timing.target_passes


@pytest.mark.covering(1)
@pytest.mark.parametrize("draft", ["equal", "near", "other", "stubborn"])
@pytest.mark.parametrize("seed", range(3))
def test_speculation_changes_neither_beams_nor_scores(seed: int, draft: str) -> None:
    pair, ends = Pair(seed, 3 + seed), frozenset({0} if seed else ())
    for width, longest in itertools.product((1, 2, 4), (1, 5, 9)):
        params = wide(width, longest, length_penalty=0.8)
        plain = plainly(pair, params, ends)
        for length in (1, 2, 5):
            drafted = searched(rig_with(pair, drafts_for(pair)[draft], length, ends=ends), params)
            assert told(drafted) == told(plain)
            assert passes(drafted) <= passes(plain), "a draft cost a pass"


@both_caches
@pytest.mark.parametrize("length", [1, 3])
def test_a_good_draft_saves_passes(cache: MakeCache, length: int) -> None:
    pair = Pair(4, 6, FULL_SUPPORT)
    params = wide(3, 20)
    plain = plainly(pair, params)
    drafted = searched(rig_with(pair, pair.target, length, cache=cache), params)
    assert told(drafted) == told(plain)
    assert passes(plain) == 20
    assert passes(drafted) <= 20 / (1 + length / 2)
    spec = drafted[0].metrics.speculative_decoding
    assert spec.num_accepted_draft_tokens == 20 - passes(drafted), "each accepted round is a pass less"
    assert spec.num_spec_steps <= passes(drafted) - 1
    assert spec.num_accepted_draft_tokens <= spec.num_tested_tokens <= length * spec.num_spec_steps
    assert drafted[0].metrics.verification == "beam"


CACHES = {"paged": paged, "slotted": slotted, "8 blocks": few_blocks(8), "10 blocks": few_blocks(10)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("limits", [Limits(28, 4, 64), Limits(28, 4, 14), Limits(28, 3, 5), Limits(28, 2, 20)], ids=str)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("draft", ["equal", "near"])
def test_drafted_searches_beside_others_are_the_same(draft: str, cache: str, limits: Limits) -> None:
    """Searches and drafts of others share budget and memory of both caches; some are set aside and come back."""
    rig = rig_with(CROWDED, drafts_for(CROWDED)[draft], 3, limits, CROWD_ENDS, cache=CACHES[cache])
    requests = add_crowd(rig)
    rig.finish()
    assert told(requests) == one_at_a_time()
    target = rig.engine._context.target
    assert isinstance(target, TableModel)
    assert max(target.num_rows) <= limits.max_num_batched_tokens


@pytest.mark.parametrize("blocks", [7, 8, 12, 20])
def test_a_draft_model_short_of_memory_drafts_less(blocks: int) -> None:
    pair, params = Pair(4, 6, FULL_SUPPORT), wide(3, 20)
    limits = Limits(28, 2, 128)
    drafter = model_drafter(TableModel(pair.target, 6), 6, limits=limits, cache=few_blocks(blocks))
    rig = build_rig(TableModel(pair.target, 6), drafter, length=3, limits=limits)
    assert told(searched(rig, params)) == told(plainly(pair, params))


def test_a_small_budget_gives_small_drafts() -> None:
    """Hypotheses take their rows of the pass first; drafts take the rest."""
    pair, params = Pair(4, 6, FULL_SUPPORT), wide(3, 20)
    taken = []
    for budget in (1, 8, 16, 24, 64):
        target = TableModel(pair.target, 6)
        limits = Limits(40, 1, budget)
        drafter = model_drafter(TableModel(pair.target, 6), 6, limits=limits)
        drafted = searched(build_rig(target, drafter, length=3, limits=limits), params)
        assert told(drafted) == told(plainly(pair, params))
        assert max(target.num_rows) <= budget
        taken.append(passes(drafted))
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < 12


def test_a_draft_model_of_few_positions_stops_in_time() -> None:
    pair, params = Pair(4, 6, FULL_SUPPORT), wide(3, 20)
    drafter = model_drafter(TableModel(pair.target, 6, max_positions=12), 6, limits=ROOMY)
    drafted = searched(build_rig(TableModel(pair.target, 6), drafter, length=4, limits=ROOMY), params)
    assert told(drafted) == told(plainly(pair, params))
    assert 0 < drafted[0].metrics.speculative_decoding.num_spec_steps < 8


def test_a_drafter_of_trees_searches_no_deeper_than_they_are() -> None:
    pair, params = Pair(4, 6, FULL_SUPPORT), wide(3, 20)
    deepest = 0
    for depth in (1, 2):
        draft = TableModel(pair.target, 6)
        drafter = model_drafter(draft, 6, limits=ROOMY, topology=StaticTree.of_widths([2] * depth))
        drafted = searched(build_rig(TableModel(pair.target, 6), drafter, length=9, limits=ROOMY), params)
        assert told(drafted) == told(plainly(pair, params))
        deepest = len(drafted[0].metrics.speculative_decoding.acceptance_histogram) - 1
        assert deepest == depth


@pytest.mark.parametrize("wish", [False, {"num_speculative_tokens": 0}])
def test_a_search_may_decline_drafts(wish: Any) -> None:
    pair = Pair(4, 6, FULL_SUPPORT)
    (request,) = searched(rig_with(pair, pair.target, 3), SamplingParams(beam_width=3, max_tokens=9, speculation=wish))
    assert passes([request]) == 9
    assert request.metrics.speculative_decoding.num_draft_tokens == 0
    assert request.metrics.verification == (None if wish is False else "beam")


def test_a_search_may_ask_for_longer_drafts() -> None:
    pair = Pair(4, 6, FULL_SUPPORT)
    wish = {"num_speculative_tokens": 6}
    few = searched(rig_with(pair, pair.target, 1), wide(2, 20))
    many = searched(rig_with(pair, pair.target, 1), wide(2, 20, speculation=wish))
    assert told(many) == told(few)
    assert passes(many) < passes(few)


def test_a_drafter_that_can_t_search_gets_no_search() -> None:
    asked: list[int] = []

    def guess(request: Request) -> DraftTree:
        asked.append(request.seq_id)
        return DraftTree(torch.tensor([1, 2]), torch.tensor([-1, -1]))

    class Limited(ScriptedDrafter):
        def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
            assert all(
                limit == 0 for request, limit in zip(requests, limits, strict=True) if request.search is not None
            )
            return super().propose(requests, limits)

    pair, params = Pair(4, 6, FULL_SUPPORT), wide(3, 9)
    rig = build_rig(TableModel(pair.target, 6), Limited(guess, DrafterNeeds(emits_tree=True)), length=4, limits=ROOMY)
    drafted = searched(rig, params)
    assert told(drafted) == told(plainly(pair, params))
    assert [each.metrics.verification for each in drafted] == [None] * 3


@pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float32", "bfloat16"]))
def test_beams_of_the_embedded_pair_are_the_same_bit_for_bit(dtype: str) -> None:
    params = [
        SamplingParams(beam_width=width, n=width, max_tokens=20, length_penalty=penalty)
        for width, penalty in [(3, 0.5), (4, 1.5), (2, 1.0), (6, 1.0)][: examples(4, least=2)]
    ]
    settings = {"dtype": dtype, "kernels": "native", "max_model_len": 128}
    prompts = PROMPTS[: 10 * len(params) : 10]
    plain = LLM("demo", max_num_seqs=1, **settings).generate(prompts, params)
    for batch in (4, 1)[: examples(2, least=1)]:
        drafted = LLM("demo", draft_model="demo", spec_length=4, max_num_seqs=batch, **settings)
        fast = drafted.generate(prompts, params)
        for one, other in zip(plain, fast, strict=True):
            assert other.outputs == one.outputs
        assert [out.metrics.verification for out in fast] == ["beam"] * len(params)
        taken = [sum(out.metrics.timing.target_passes for out in outs) for outs in (plain, fast)]
        assert taken[1] < 0.7 * taken[0]
