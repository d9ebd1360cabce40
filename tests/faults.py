"""Faults that change the output's distribution, for checks that must find them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from speculant.drafting import ModelDrafter
from speculant.models import Chain
from speculant.types import DraftTree
from speculant.verification import rejection


def always(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    """Return ratios that keep every drafted token."""
    return [1.0] * tree.size


def accept_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `rejection` keep every drafted token."""
    monkeypatch.setattr(rejection, "likelihood_ratios", always)


def report_flatter_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a draft model report flatter distributions for chains than the ones that it drew from."""
    draw = ModelDrafter._grow

    def flatter(drafter: ModelDrafter, chains: Sequence[Chain]) -> None:
        draw(drafter, chains)
        for chain in chains:
            if chain.probs is not None:
                weights = chain.probs**0.3
                chain.probs = weights / weights.sum(-1, keepdim=True)

    monkeypatch.setattr(ModelDrafter, "_grow", flatter)
