"""A draft model drafts from committed tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from speculant.config import Limits
from speculant.drafting.model.drafter import ModelDrafter
from speculant.lab.exactness.tables import FULL_SUPPORT, Pair, TableModel
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.exactness.distributions import transformed
from tests.fakes import (
    MakeCache,
    Rig,
    both_caches,
    build_rig,
    few_blocks,
    model_drafter,
    paged,
)

V = 3
NOTHING: frozenset[int] = frozenset()


class Checked(ModelDrafter):
    """The real drafter, whose trees must carry the draft's distribution at each node's true history."""

    pair: Pair
    sizes: list[int]

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        trees = super().propose(requests, limits)
        for request, tree in zip(requests, trees, strict=True):
            self.sizes.append(tree.size)
            if tree.size:
                assert tree.probs is not None
                torch.testing.assert_close(tree.probs, self._expected(request, tree), rtol=0, atol=1e-12)
        return trees

    def _expected(self, request: Request, tree: DraftTree) -> torch.Tensor:
        histories = [(*request.tokens, *tree.tokens_to(node - 1)) for node in range(tree.size)]
        distributions = [
            transformed(self.pair.draft(h), request.params, h, len(request.prompt), NOTHING) for h in histories
        ]
        return torch.tensor(distributions, dtype=torch.float64)


def checked_rig(
    pair: Pair, limits: Limits, length: int, cache: MakeCache = paged, draft_cache: MakeCache | None = None
) -> tuple[Rig, Checked]:
    drafter = model_drafter(TableModel(pair.draft, V), V, limits=limits, cache=draft_cache or cache)
    drafter.__class__ = Checked
    assert isinstance(drafter, Checked)
    drafter.pair, drafter.sizes = pair, []
    target = TableModel(pair.target, V)
    return build_rig(target, drafter, length=length, limits=limits, cache=cache), drafter


DISTRIBUTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "transformed": {"top_k": 2, "temperature": 0.7, "frequency_penalty": 0.4},
}


@pytest.mark.covering(1)
@both_caches
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_drafts_follow_the_committed_tokens(length: int, distribution: str, cache: MakeCache) -> None:
    for seed in range(2):
        rig, drafter = checked_rig(Pair(seed, V, FULL_SUPPORT), Limits(48, 3, 48), length, cache)
        for prompt in ((0,), (1, 2), (2, 2, 0, 1)):
            rig.add(prompt, SamplingParams(max_tokens=16, **DISTRIBUTIONS[distribution]), str(prompt))
        rig.finish()
        assert max(drafter.sizes) == length


def test_a_backlog_is_caught_up_in_parts() -> None:
    rig, drafter = checked_rig(Pair(1, V, FULL_SUPPORT), Limits(64, 2, 4), 2)
    rig.add((0, 1, 2, 2, 1, 0, 0, 1, 2, 1), SamplingParams(max_tokens=30), "long")
    rig.add((1,), SamplingParams(max_tokens=30), "short")
    rig.finish()
    assert drafter.sizes.count(2) > 5


def test_a_round_without_a_draft_is_caught_up() -> None:
    """One node fits beside two roots: the second request drafts only when the first is over."""
    rig, drafter = checked_rig(Pair(2, V, FULL_SUPPORT), Limits(64, 2, 3), 2)
    rig.add((0,), SamplingParams(max_tokens=8), "first")
    rig.add((1,), SamplingParams(max_tokens=24), "second")
    rig.finish()
    assert {0, 1, 2} == set(drafter.sizes)


def test_rounds_between_two_drafts_are_caught_up() -> None:
    """While a late prompt takes the whole budget, the first request goes on without drafts."""
    rig, drafter = checked_rig(Pair(5, V, FULL_SUPPORT), Limits(96, 2, 6), 4)
    rig.add((0,), SamplingParams(max_tokens=80), "first")
    for prompt in ((1,) * 20, (2,) * 16, (0,) * 20):
        rig.step()
        rig.step()
        rig.add(prompt, SamplingParams(max_tokens=2), str(prompt))
        drafter.sizes.clear()
        while len(rig.requests) > 1:
            rig.step()
        assert drafter.sizes.count(0) > 4
    rig.finish()
    assert drafter.sizes.count(4) > 2


@both_caches
def test_memory_that_was_used_before_is_clean(cache: MakeCache) -> None:
    """Requests come, are aborted in the middle, and others take their slots or blocks."""
    rig, _ = checked_rig(Pair(4, V, FULL_SUPPORT), Limits(48, 2, 48), 3, cache)
    for index in range(6):
        rig.add((index % V,), SamplingParams(max_tokens=12), str(index))
        rig.step()
        rig.step()
        if index % 2:
            rig.abort(str(index - 1))
    rig.finish()


@pytest.mark.parametrize("draft_blocks", [8, 40])
def test_a_resumed_request_is_drafted_from_its_own_tokens(draft_blocks: int) -> None:
    """The target's memory preempts requests, whose drafts begin anew; the draft's own memory may be short, too."""
    limits, tight = Limits(28, 4, 32), few_blocks(9)
    rig, _ = checked_rig(Pair(7, V, FULL_SUPPORT), limits, 3, tight, few_blocks(draft_blocks))
    requests = [rig.add((index % V,) * (3 + index), SamplingParams(max_tokens=18), str(index))[0] for index in range(5)]
    rig.finish()
    assert rig.engine.metrics.preemptions > 1
    again = [request for request in requests if request.metrics.num_preemptions]
    assert all(request.metrics.speculative_decoding.num_spec_steps > 0 for request in again)


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_goes_on_from_a_known_prefix(seed: int) -> None:
    """Prompts that end everywhere in a text for which drafts were often rejected."""
    rig, drafter = checked_rig(Pair(seed, V, FULL_SUPPORT), Limits(48, 2, 48), 4)
    (first,) = rig.add((0, 1), SamplingParams(max_tokens=30))
    rig.finish()
    rejected = first.metrics.speculative_decoding
    assert rejected.num_accepted_draft_tokens < rejected.num_draft_tokens
    for end in range(2, len(first.tokens)):
        drafter.sizes.clear()
        rig.add(first.tokens[:end], SamplingParams(max_tokens=8))
        rig.finish()
        assert max(drafter.sizes) == 4


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_a_draft_cache_that_is_too_small_for_all(num_blocks: int) -> None:
    """A request without room drafts less or nothing, is not preempted for it, and drafts once there is room again."""
    limits = Limits(24, 3, 32)
    rig, drafter = checked_rig(Pair(3, V, FULL_SUPPORT), limits, 4, paged, few_blocks(num_blocks))
    for index in range(3):
        rig.add((index,), SamplingParams(max_tokens=12 + 5 * index), str(index))
    rig.finish()
    assert rig.engine.metrics.preemptions == 0
    assert 0 in drafter.sizes
    assert 4 in drafter.sizes[-3:]
