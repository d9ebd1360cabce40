"""A draft model whose own drafting is speculated by another drafter (arXiv 2211.17192, section 6).

The inner drafter guesses the draft model's next tokens, and one pass of the draft model computes the rows of all of
them. Each token is drawn from the draft model's own distribution with the chance of a draft, so that tokens and probs
are the same as without guesses, and the verifier may use them. Guessed tokens that were not
drawn are dropped from the draft model's cache.

The inner drafter sees a copy of each request in which the drafted tokens follow. After a rejection it rolls back, and
catches up with the whole text again unless it overrides `Drafter.roll_back`.

Memory: the draft model, the inner drafter, and a copy of each sequence's tokens. Cost: between 1 and n
passes of the draft model for n tokens, 145 microseconds more than a native chain for each pass, and the inner drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from speculant.cache import Source
from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.composite import CompositeDrafter, SubDrafter, build_sub_drafter
from speculant.drafting.heads.short import read_head_tokens
from speculant.drafting.methods import WITH_MODEL
from speculant.drafting.model.drafter import DraftModelRunner, ModelDrafter
from speculant.models import Chain
from speculant.types import CommittedRows, DraftRules, DraftTree, Request

METHOD = Method(default_length=5, uses_model=True)


@dataclass(frozen=True)
class CascadeOptions:
    """inner: the method that guesses, by name or as a mapping with `method` and its options.

    None = the first of the methods that look drafts up in text. head_tokens: as of a draft model.
    """

    inner: Any = None
    head_tokens: Any = None


@dataclass(eq=False)
class DraftedRequest(Request):
    """A copy of a request with tokens of its own: the committed ones, then drafted ones.

    The first `agreed` tokens are known to be committed. It has no constraint, because a forbidden guess is never drawn.
    """

    agreed: int = 0


def copy_of(request: Request) -> DraftedRequest:
    """Return a copy with the request's tokens. Draws for it use shared noise, as its drafts need no probs."""
    return DraftedRequest(
        seq_id=request.seq_id,
        request_id=request.request_id,
        index=request.index,
        prompt=request.prompt,
        params=request.params,
        seed=request.seed,
        metrics=request.metrics,
        sender=request.sender,
        drafts=DraftRules(prediction=request.drafts.prediction),
        stops=request.stops,
        source=request.source,
        tokens=list(request.tokens),
        num_drafted=request.num_drafted,
        agreed=len(request.tokens) - request.num_drafted,
    )


class InnerDrafter(CompositeDrafter):
    """Guesses the tokens that a draft model draws next; its sub-drafter sees a copy of each request."""

    listens = False  # unless the sub-drafter does

    def __init__(self, sub_drafter: SubDrafter, vocab_size: int) -> None:
        super().__init__([sub_drafter], vocab_size)
        self._copies: dict[int, DraftedRequest] = {}

    @override
    def begin(self, request: Request) -> None:
        self._copies[request.seq_id] = copy = copy_of(request)
        super().begin(copy)

    @override
    def observe_source(self, request: Request, source: Source) -> None:
        super().observe_source(self._copies[request.seq_id], source)

    @override
    def end(self, request: Request) -> None:
        if request.seq_id in self._copies:
            super().end(self._committed(request))
            del self._copies[request.seq_id]

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        super().catch_up([self._committed(request) for request in requests])

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        super().observe(self._committed(request), rows)

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Wait for the next call, which compares the copy with the request."""

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Propose nothing by itself: the draft model asks for guesses."""
        return [DraftTree.empty()] * len(requests)

    def guess(self, chains: Sequence[Chain]) -> list[DraftTree]:
        """Return, for each chain, a guess of the tokens that it draws next; see `Guess`."""
        pairs = [(self._drafted(chain), chain.limit - len(chain.tokens) - 1) for chain in chains]
        guesses = self.propose_with(self.guarded[0], pairs)
        return [guesses.get(chain.request.seq_id, DraftTree.empty()) for chain in chains]

    def _drafted(self, chain: Chain) -> DraftedRequest:
        """Return a request's copy with the tokens of its draft so far."""
        if not chain.tokens:
            return self._committed(chain.request)
        copy = self._copies[chain.request.seq_id]
        copy.extend(chain.tokens[len(copy.tokens) - len(chain.request.tokens) :])
        copy.num_drafted = chain.request.num_drafted + len(chain.tokens)
        return copy

    def _committed(self, request: Request) -> DraftedRequest:
        """Return a request's copy with exactly its tokens; drafted ones that differ are rolled back."""
        copy = self._copies[request.seq_id]
        most = min(len(copy.tokens), len(request.tokens))
        keep = min(copy.agreed, most)
        while keep < most and copy.tokens[keep] == request.tokens[keep]:
            keep += 1
        dropped = copy.tokens[keep:]
        if dropped:
            copy.shorten(keep)
            super().roll_back(copy, dropped)
        copy.extend(request.tokens[keep:])
        copy.agreed, copy.num_drafted = len(request.tokens) - request.num_drafted, request.num_drafted
        copy.rounds = request.rounds
        copy.ending = request.ending
        return copy


class CascadeDrafter(CompositeDrafter):
    """A draft model and its inner drafter, of which the model drafts; see the module's docstring.

    The model alone drafts for beam searches.
    """

    def __init__(self, runner: DraftModelRunner, inner: SubDrafter, context: DrafterContext) -> None:
        model, guessing = (
            ModelDrafter(runner, context.target.vocab_size, context.target.sampler),
            InnerDrafter(inner, context.target.vocab_size),
        )
        model.guess = guessing.guess
        members = [SubDrafter(WITH_MODEL, model, METHOD.default_length), SubDrafter(inner.method, guessing, 1)]
        super().__init__(members, context.target.vocab_size)
        self.needs = replace(model.needs, hidden_layers=self.needs.hidden_layers, reads=self.needs.reads)
        self._guessing, self.sub_drafters = guessing, guessing.sub_drafters

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        before = self._guessing.errors
        drafts = self.propose_with(self.guarded[0], zip(requests, limits, strict=True))
        self.count(self._guessing.errors - before)  # of guesses, which the model asks for
        return [drafts.get(request.seq_id, DraftTree.empty()) for request in requests]


def build(context: DrafterContext) -> CascadeDrafter:
    """Load the draft checkpoint, give it a cache of its own, and build the inner drafter."""
    options = read_options(context, CascadeOptions)
    inner = build_sub_drafter(replace(context, model=None), options.inner)
    model = context.models.load(str(context.model), read_head_tokens(options.head_tokens))
    return CascadeDrafter(DraftModelRunner.of(context, model), inner, context)
