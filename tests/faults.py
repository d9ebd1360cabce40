"""Faults that change the output's distribution, for checks that must find them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from speculant.drafting import ModelDrafter
from speculant.types import DraftTree, Request
from speculant.verification import rejection


def always(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    """Return ratios that keep every drafted token."""
    return [1.0] * tree.size


def accept_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `rejection` keep every drafted token."""
    monkeypatch.setattr(rejection, "likelihood_ratios", always)


def report_flatter_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a draft model report flatter distributions for chains than the ones that it drew from."""
    propose = ModelDrafter.propose

    def flatter(drafter: ModelDrafter, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [flat(draft) for draft in propose(drafter, requests, limits)]

    def flat(draft: DraftTree) -> DraftTree:
        if draft.probs is None or not draft.is_chain:
            return draft
        weights = draft.probs**0.3
        return DraftTree.chain(draft.token_list, weights / weights.sum(-1, keepdim=True))

    monkeypatch.setattr(ModelDrafter, "propose", flatter)
