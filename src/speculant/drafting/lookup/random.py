"""Uniform tokens (arXiv 2211.17192, section 3.6): a lower bound for the worth of other drafters.

A token is accepted about once in V times, so drafts cost a longer pass and save next to nothing. Where a ratio rule
verifies, each node's `probs` are the uniform distribution that it was drawn from; with shared noise the draws use the
target's noise.

Memory: one row of V numbers. Cost: a draw over V tokens for each drafted token, at V = 8192 20 microseconds, 40 with
shared noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, StatelessDrafter, no_options
from speculant.drafting.growth import draw_chains, new_chains
from speculant.sampling import Chances, Node
from speculant.types import DraftTree, Request

METHOD = Method(default_length=4)


class RandomDrafter(StatelessDrafter):
    """Draws every token of a chain uniformly from `vocab_size` tokens."""

    needs = DrafterNeeds(emits_probs=True)

    def __init__(self, chances: Chances, vocab_size: int, device: torch.device) -> None:
        self._chances = chances
        self._uniform = torch.full((1, vocab_size), 1 / vocab_size, dtype=torch.float64, device=device)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return draw_chains(new_chains(zip(requests, limits, strict=True), self._chances), self._next_probs)

    def _next_probs(self, nodes: Sequence[Node]) -> Tensor:
        return self._uniform.expand(len(nodes), -1)


def build(context: DrafterContext) -> RandomDrafter:
    """Make the drafter; it needs no model and has no options."""
    no_options(context)
    return RandomDrafter(context.chances, context.target.vocab_size, context.target.device)
