"""A draft model and its KV cache, which follow the requests that it drafts for.

The cache holds committed tokens, and possibly drafts of the last round. The next round rolls back the
drafts that were rejected and computes the tokens that are missing:

    cached     p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; y is the next input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from speculant.cache.base import KVCache, ReservationPlan
from speculant.drafting.base import DrafterContext
from speculant.models.base import CausalLM, Chain, Hidden, SequenceInput, known
from speculant.sampling.chance import Chances, MostLikely
from speculant.types import DraftTree, Request


@dataclass
class _CachedTokens:
    """The tokens in one sequence's cache; the first `agreed` are known to be committed."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


class DraftModelRunner:
    """A draft model with a KV cache of its own.

    The cache may lack a request's newest tokens: its backlog. A backlog over max_num_batched_tokens takes several
    rounds, without drafting. stop_below: see `Chain`.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        max_num_batched_tokens: int,
        stop_below: float = 0.0,
    ) -> None:
        self.model, self.cache, self._stop_below = model, cache, stop_below
        self._chances, self._budget = chances, max_num_batched_tokens
        self._cached: dict[int, _CachedTokens] = {}

    @classmethod
    def of(cls, context: DrafterContext, model: CausalLM, **own: Any) -> Self:
        """Return the runner of a model, with a cache of its own; own: further arguments of a subclass."""
        cache = context.make_cache(model.cache_shape)
        return cls(model, cache, context.chances, context.max_num_batched_tokens, context.stop_below, **own)

    def begin(self, request: Request) -> None:
        """Start a new sequence; nothing is computed before the first draft (docs/references.md, lazy prefill)."""
        self._cached[request.seq_id] = _CachedTokens()

    def end(self, request: Request) -> None:
        """Forget a sequence and release its blocks."""
        self._cached.pop(request.seq_id, None)
        self.cache.release(request.seq_id)

    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Record tokens that a pass has added to the cache."""
        self._cached[request.seq_id].tokens += tokens

    def finish(self, request: Request) -> None:
        """Drop the drafted tokens from a sequence's cache."""
        self.cache.truncate_to(request.seq_id, len(request.tokens))

    def tree_input(self, request: Request, tree: DraftTree) -> SequenceInput:
        """Return the input of a root and the tree below it, after dropping them from the cache."""
        self.cache.truncate_to(request.seq_id, len(request.tokens) - 1)
        return SequenceInput(request.seq_id, known(request.tokens[-1:], self.model.vocab_size), tree)

    def keep(self, inputs: Sequence[SequenceInput], hidden: Hidden) -> None:
        """Keep the states that later rows of these sequences take in; most models take in tokens alone."""

    def plan(self, drafting: Sequence[tuple[Request, int]]) -> list[Chain]:
        """Plan input tokens and draws for pairs (request, wanted nodes), within the token budget and the cache.

        A chain without enough room gets a lower limit; limit 0 = only catch up.
        """
        chains, plan = self._plan_inputs(drafting), self.cache.plan()
        for chain in chains:
            if not plan.take(chain.request.seq_id, chain.num_positions):
                plan = self.cache.plan()
                chains = self._plan_inputs(drafting, plan)
                _take_in_turn(plan, chains)
                break
        return chains

    def _plan_inputs(self, drafting: Sequence[tuple[Request, int]], plan: ReservationPlan | None = None) -> list[Chain]:
        """Take each request's missing tokens within budget and room; one that still has a backlog draws nothing.

        plan: the room; None = unlimited.
        """
        budget, stop, chains = self._budget, self._stop_below, list[Chain]()
        for request, limit in drafting:
            start, total = self._roll_back(request), len(request.tokens)
            most = budget if plan is None else min(budget, plan.room(request.seq_id))
            missing, hidden = self._missing(request, start, most)
            if missing:
                if plan is not None:
                    plan.take(request.seq_id, len(missing))
                budget -= len(missing)
                drawn = limit if start + len(missing) == total else 0
                chance = MostLikely() if stop and request.params.greedy else self._chances.draft(request)
                chains.append(Chain(request, missing, drawn, chance, [], None, stop, hidden))
        return chains

    def _missing(self, request: Request, start: int, most: int) -> tuple[list[int], Tensor | None]:
        """Return the next input tokens, those from `start` on, with the hidden states that they take in."""
        return request.tokens[start : start + most], None

    def _roll_back(self, request: Request) -> int:
        """Drop cached tokens that were not committed or that a failed pass reserved; the newest token is dropped too.

        A new sequence takes over matching prefixes of other sequences. Returns how many tokens are left.
        """
        cached, held = self._cached[request.seq_id], self.cache.length(request.seq_id)
        if not cached.tokens and not held:
            self.cache.release(request.seq_id)
            held = self.cache.match_prefix(request.seq_id, request.tokens, request.cache_salt)
            cached.tokens = request.tokens[:held]
        keep, most = cached.agreed, min(len(cached.tokens), len(request.tokens) - 1)
        while keep < most and cached.tokens[keep] == request.tokens[keep]:
            keep += 1
        cached.agreed = keep
        del cached.tokens[keep:]
        if keep < held:
            self.cache.truncate_to(request.seq_id, keep)
        self.cache.insert_prefix(request.seq_id, request.tokens)
        return keep


def _take_in_turn(plan: ReservationPlan, chains: Sequence[Chain]) -> None:
    """Share the room left after the input tokens, one position per chain in turn, and cut the drafts to it."""
    growing = [chain for chain in chains if chain.limit > 1]
    for length in range(1, max((chain.limit for chain in growing), default=0)):
        for chain in growing:
            if not plan.take(chain.request.seq_id, 1):
                chain.limit = length
        growing = [chain for chain in growing if chain.limit > length + 1]
