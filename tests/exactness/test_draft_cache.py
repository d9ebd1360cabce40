"""A draft model drafts from what was committed, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from speculant.config import Limits
from speculant.drafting.draft_model import ModelDrafter
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.exactness.laws import FULL_SUPPORT, Pair, transformed
from tests.fakes import TableModel, build_rig, model_drafter

V = 3
NOTHING: frozenset[int] = frozenset()


class Checked(ModelDrafter):
    """The real drafter, whose trees must carry the draft's law at each node's true history."""

    pair: Pair
    sizes: list[int]

    def propose(self, seqs: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        trees = super().propose(seqs, limits)
        for seq, tree in zip(seqs, trees, strict=True):
            self.sizes.append(tree.size)
            if tree.size:
                assert tree.probs is not None
                torch.testing.assert_close(tree.probs, self._expected(seq, tree), rtol=0, atol=1e-12)
        return trees

    def _expected(self, seq: Request, tree: DraftTree) -> torch.Tensor:
        histories = [(*seq.tokens, *tree.tokens_to(node - 1)) for node in range(tree.size)]
        laws = [transformed(self.pair.draft(h), seq.params, h, len(seq.prompt), NOTHING) for h in histories]
        return torch.tensor(laws, dtype=torch.float64)


def checked(pair: Pair, limits: Limits) -> Checked:
    drafter = model_drafter(TableModel(pair.draft, V), V, limits=limits)
    drafter.__class__ = Checked
    assert isinstance(drafter, Checked)
    drafter.pair, drafter.sizes = pair, []
    return drafter


LAWS: dict[str, dict[str, float]] = {
    "plain": {},
    "transformed": {"top_k": 2, "temperature": 0.7, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_drafts_follow_the_committed_tokens(length: int, law: str) -> None:
    limits = Limits(48, 3, 48)
    for seed in range(3):
        pair = Pair(seed, V, FULL_SUPPORT)
        drafter = checked(pair, limits)
        rig = build_rig(TableModel(pair.target, V), drafter, length=length, limits=limits, seed=seed)
        for prompt in ((0,), (1, 2), (2, 2, 0, 1)):
            rig.add(prompt, SamplingParams(max_tokens=16, **LAWS[law]), str(prompt))
        rig.finish()
        assert max(drafter.sizes) == length


def test_a_backlog_is_caught_up_in_parts() -> None:
    limits = Limits(64, 2, 4)
    pair = Pair(1, V, FULL_SUPPORT)
    drafter = checked(pair, limits)
    rig = build_rig(TableModel(pair.target, V), drafter, length=2, limits=limits)
    rig.add((0, 1, 2, 2, 1, 0, 0, 1, 2, 1), SamplingParams(max_tokens=30), "long")
    rig.add((1,), SamplingParams(max_tokens=30), "short")
    rig.finish()
    assert drafter.sizes.count(2) > 5


def test_a_round_without_a_draft_is_caught_up() -> None:
    """One node fits beside two roots: the second request drafts only when the first is over."""
    limits = Limits(64, 2, 3)
    pair = Pair(2, V, FULL_SUPPORT)
    drafter = checked(pair, limits)
    rig = build_rig(TableModel(pair.target, V), drafter, length=2, limits=limits)
    rig.add((0,), SamplingParams(max_tokens=8), "first")
    rig.add((1,), SamplingParams(max_tokens=24), "second")
    rig.finish()
    assert {0, 1, 2} == set(drafter.sizes)


def test_rounds_between_two_drafts_are_caught_up() -> None:
    """While a late prompt takes the whole budget, the first request goes on without drafts."""
    limits = Limits(64, 2, 6)
    pair = Pair(5, V, FULL_SUPPORT)
    drafter = checked(pair, limits)
    rig = build_rig(TableModel(pair.target, V), drafter, length=4, limits=limits)
    rig.add((0,), SamplingParams(max_tokens=50), "first")
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


def test_a_slot_that_was_used_before_is_clean() -> None:
    """Requests come, are aborted in the middle, and others take their slots."""
    limits = Limits(48, 2, 48)
    pair = Pair(4, V, FULL_SUPPORT)
    drafter = checked(pair, limits)
    rig = build_rig(TableModel(pair.target, V), drafter, length=3, limits=limits)
    for index in range(6):
        rig.add((index % V,), SamplingParams(max_tokens=12), str(index))
        rig.step()
        rig.step()
        if index % 2:
            rig.abort(str(index - 1))
    rig.finish()
