"""A drafter that consists of the target's first layers and uses the target's own keys and values.

The target's passes have stored keys and values of the committed tokens. A draft computes the newest token and the
drafted tokens, and writes their keys and values after the committed positions. It drops these positions when it ends.
The target's pass comes next and writes them again, in all layers:

    target's cache    p p p t t                 committed
    draft             p p p t t r x x           r = the newest token, x = drafted ones: the first layers alone
    target's pass     p p p t t r x x           the same positions, all layers

The engine counts these positions for the target's pass before it calls a drafter. So a draft never takes a block from
another sequence. In an engine, this drafter has no backlog and no state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cached_property

from typing_extensions import override

from speculant.cache import KVCache, part_of
from speculant.drafting.base import DrafterContext
from speculant.drafting.model.drafter import DraftModelRunner, DraftSources, ModelDrafter, TargetSources
from speculant.drafting.topology import DynamicTree, TreeTopology
from speculant.models import CausalLM
from speculant.types import DraftTree, Request


class TargetCacheRunner(DraftModelRunner):
    """Runs the target's first layers, `model`, on the target's cache, which holds the first positions of each sequence.

    In an engine, the newest token is the only committed one that a draft computes, so the runner has no token budget.
    Without a target's cache, the runner makes a cache, and each draft computes its whole text.
    """

    owns_cache = False

    def __init__(self, model: CausalLM, target: CausalLM, context: DrafterContext) -> None:
        super().__init__(model, None, context.chances, sys.maxsize, context.stop_below)
        self._context, self._whole = context, target.cache_shape
        self._held: dict[int, int] = {}  # positions that a sequence held before its draft

    @cached_property
    def _shared(self) -> KVCache | None:  # type: ignore[override]
        return self._context.target.cache()

    @cached_property
    def cache(self) -> KVCache:
        """The target's cache, as the first layers see it."""
        cache = self._context.make_cache(self._whole) if self._shared is None else self._shared
        return part_of(cache, self._whole, self.model.cache_shape)

    @cached_property
    def sources(self) -> DraftSources:
        """The encoded sources: the target's, in the target's cache."""
        return DraftSources(self.model, self.cache) if self._shared is None else TargetSources(self.model, self.cache)

    @override
    def begin(self, request: Request) -> None:
        """Do nothing: there is no state."""

    @override
    def end(self, request: Request) -> None:
        """Leave the positions in the target's cache, which are the target's."""
        if self._shared is None:
            self.cache.release(request.seq_id)
        self.sources.release(request)

    @override
    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Record nothing: drafted tokens are given back."""

    @override
    def finish(self, request: Request) -> None:
        """Wait for `give_back`, which drops the drafted tokens."""

    def give_back(self) -> None:
        """Drop the positions that drafts have added."""
        for seq_id, length in self._held.items():
            if self.cache.length(seq_id) > length:
                self.cache.truncate_to(seq_id, length)
        self._held.clear()

    @override
    def _roll_back(self, request: Request) -> tuple[int, list[int]]:
        """Return the target's positions, which are committed."""
        return self._held.setdefault(request.seq_id, self.cache.length(request.seq_id)), self.text(request)


class TargetCacheDrafter(ModelDrafter):
    """Drafts chains, trees and continuations of beam searches with a `TargetCacheRunner`."""

    _runner: TargetCacheRunner

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Leave the target's cache as it was, also after an error."""
        try:
            return super().propose(requests, limits)
        finally:
            self._runner.give_back()

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        """Do nothing: there is no backlog."""


def make_target_drafter(
    context: DrafterContext, target: CausalLM, first: CausalLM, topology: TreeTopology | DynamicTree | None
) -> TargetCacheDrafter:
    """Return the drafter of a target's first layers; topology None = chains."""
    runner = TargetCacheRunner(first, target, context)
    return TargetCacheDrafter(runner, context.target.vocab_size, context.target.sampler, topology)
