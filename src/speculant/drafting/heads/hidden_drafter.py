"""A drafter around a head that continues the target's hidden states: chains, or trees of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext
from speculant.drafting.heads.hidden_runner import Encode, HiddenStateRunner
from speculant.drafting.model.drafter import ModelDrafter
from speculant.drafting.topology import DynamicTree, TreeTopology, growing_tree_option
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.types import CommittedRows, DraftTree, Request

MOST_PENDING = 512  # states of a sequence that wait for its next draft


class HiddenDrafter(ModelDrafter):
    """Drafts with the head of `runner`; layers: those whose states it reads.

    Beam searches get no drafts. The length of a sequence is not bounded: see drafting/heads/layers.py.
    """

    _runner: HiddenStateRunner

    def __init__(
        self,
        runner: HiddenStateRunner,
        layers: Sequence[int],
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | DynamicTree | None = None,
    ) -> None:
        super().__init__(runner, vocab_size, sampler, topology)
        self.needs = replace(self.needs, hidden_layers=tuple(layers), nodes_per_beam=None, max_positions=None)

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        if request.search is not None:
            return
        if self._runner.observe(request, rows) > MOST_PENDING:
            self.catch_up([request])

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`; nothing is drafted after drafted tokens, whose states are not known."""
        known = zip(requests, limits, strict=True)
        return super().propose(requests, [0 if request.num_drafted else limit for request, limit in known])

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        committed = [request for request in requests if not request.num_drafted]
        super().catch_up([request for request in committed if self._runner.num_pending(request) > 1])

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`: the positions of which other sequences have computed rows."""
        if request.search is not None:
            return len(request.tokens)
        with torch.inference_mode():
            self.catch_up(self._runner.backlog())
        return self._runner.known_prefix(request)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`; only states of committed tokens were observed."""


def newest(hidden: Sequence[Tensor]) -> Tensor:
    """Return the input of a head that reads one layer: the states after the target's final norm."""
    return hidden[0]


def make_head_drafter(
    context: DrafterContext, model: CausalLM, layers: tuple[int, ...], encode: Encode, tree: Any
) -> HiddenDrafter:
    """Return the drafter of a head, with a cache of its own; see `HiddenDrafter`."""
    runner, topology = HiddenStateRunner.of(context, model, encode=encode), growing_tree_option(context, tree)
    return HiddenDrafter(runner, layers, context.vocab_size, context.sampler, topology)
