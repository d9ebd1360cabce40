"""A draft model whose own drafting is speculated by another drafter (arXiv 2211.17192, section 6).

The inner drafter guesses the draft model's next tokens, and one pass of the draft model computes the rows of all of
them. Each token is drawn from the draft model's own distribution with the chance of a draft, so that tokens and probs
are those of the draft model alone, whatever is guessed: the verifier may use them. Guessed tokens that were not drawn
are dropped from the draft model's cache.

The inner drafter sees a copy of each request in which the drafted tokens follow. After a rejection it rolls back, and
catches up with the whole text again unless it overrides `Drafter.roll_back`.

Memory: that of the draft model and of the inner drafter, and a copy of each sequence's tokens. Cost: between 1 and n
passes of the draft model for n tokens, 145 microseconds more than a native chain for each pass, and the inner drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.combine.composite import Member, build_member
from speculant.drafting.model.continuation import ShadowedDrafter
from speculant.drafting.model.drafter import ChainDrafter
from speculant.drafting.model.head_tokens import read_head_tokens
from speculant.drafting.model.runner import DraftModelRunner
from speculant.models.base import CausalLM
from speculant.types import CommittedRows, Request

METHOD = Method(default_length=5, uses_model=True)


@dataclass(frozen=True)
class Options:
    """inner: the method that guesses, by name or as a mapping with `method` and its options.

    None = the first of the methods that look drafts up in text. head_tokens: as of `draft_model`.
    """

    inner: Any = None
    head_tokens: Any = None


class CascadeDrafter(ChainDrafter):
    """See the module's docstring. Beam searches are drafted for by the model alone."""

    def __init__(self, model: CausalLM, cache: KVCache, inner: Member, context: DrafterContext) -> None:
        runner = DraftModelRunner(model, cache, context.chances, context.max_num_batched_tokens, context.stop_below)
        super().__init__(runner, context.vocab_size, context.sampler)
        self._inner = ShadowedDrafter(inner, context.vocab_size, self._count)
        self.guess = self._inner.guess
        self.needs = replace(self.needs, hidden_layers=inner.drafter.needs.hidden_layers)
        self.caches = (cache, *inner.drafter.caches)

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        super().begin(request)
        self._inner.begin(request)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        super().catch_up(requests)
        self._inner.catch_up(requests)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self._inner.observe(request, rows)

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`."""
        return self._inner.drafter.match_prefix(request)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        super().end(request)
        self._inner.end(request)

    def _count(self, errors: int) -> None:
        self.errors += errors


def build(context: DrafterContext) -> CascadeDrafter:
    """Load the draft checkpoint, give it a cache of its own, and build the inner drafter."""
    options = read_options(context, Options)
    inner = build_member(replace(context, model=None), options.inner)
    model = context.load_draft(str(context.model), read_head_tokens(options.head_tokens))
    return CascadeDrafter(model, context.make_cache(model.cache_shape), inner, context)
