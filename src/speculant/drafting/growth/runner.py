"""How a draft model keeps up with the requests it drafts for.

Its cache holds what was fed: committed tokens, and perhaps the last round's drafts. What turned out
differently is rolled back and what is missing is fed in the next round:

    fed        p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; then feed y
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from speculant.cache.base import KVCache, ReservationPlan
from speculant.models.base import CausalLM, Chain
from speculant.sampling.chance import Chances
from speculant.types import Request


@dataclass
class _CachedTokens:
    """What one sequence's cache holds; the first `agreed` tokens are known to be committed."""

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


class DraftModelRunner:
    """A model with a cache of its own that is behind the requests by whatever it has not seen.

    A backlog beyond max_num_batched_tokens is caught up over several rounds, without drafting.
    """

    def __init__(self, model: CausalLM, cache: KVCache, chances: Chances, max_num_batched_tokens: int) -> None:
        self.model, self.cache = model, cache
        self._chances, self._budget = chances, max_num_batched_tokens
        self._fed: dict[int, _CachedTokens] = {}

    def begin(self, request: Request) -> None:
        """Hear of a new sequence; nothing is fed before the first draft (docs/references.md, lazy prefill)."""
        self._fed[request.seq_id] = _CachedTokens()

    def end(self, request: Request) -> None:
        """Forget a sequence and free what it holds."""
        self._fed.pop(request.seq_id, None)
        self.cache.release(request.seq_id)

    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Hear that tokens were fed, and stay in the cache."""
        self._fed[request.seq_id].tokens += tokens

    def plan(self, drafting: Sequence[tuple[Request, int]]) -> list[Chain]:
        """Decide what is fed and drawn for requests that want so many nodes each, as far as budget and memory go.

        A chain that finds no room ends sooner; limit 0 = only catch up.
        """
        for request, _ in drafting:
            self._roll_back(request)
        chains = self._feed(drafting, _Endless())
        plan = self.cache.plan()
        if not all(plan.take(chain.request.seq_id, chain.num_positions) for chain in chains):
            plan = self.cache.plan()
            chains = self._feed(drafting, plan)
            _take_in_turn(plan, chains)
        return chains

    def _feed(self, drafting: Sequence[tuple[Request, int]], plan: ReservationPlan) -> list[Chain]:
        """Take what each has not seen, as far as budget and room go; who is still behind draws nothing."""
        budget, chains = self._budget, list[Chain]()
        for request, limit in drafting:
            start = len(self._fed[request.seq_id].tokens)
            missing = request.tokens[start : start + min(budget, plan.room(request.seq_id))]
            if missing:
                plan.take(request.seq_id, len(missing))
                budget -= len(missing)
                ready = start + len(missing) == len(request.tokens)
                chains.append(Chain(request, missing, limit if ready else 0, self._chances.draft(request)))
        return chains

    def _roll_back(self, request: Request) -> None:
        """Drop what was fed and then not committed, or reserved by a pass that failed; feed the newest token anew.

        A sequence that begins takes over what others fed of its tokens.
        """
        fed = self._fed[request.seq_id]
        if not fed.tokens and not self.cache.length(request.seq_id):
            self.cache.release(request.seq_id)
            fed.tokens = request.tokens[: self.cache.match_prefix(request.seq_id, request.tokens, request.cache_salt)]
        keep, most = fed.agreed, min(len(fed.tokens), len(request.tokens) - 1)
        while keep < most and fed.tokens[keep] == request.tokens[keep]:
            keep += 1
        fed.agreed = keep
        del fed.tokens[keep:]
        if keep < self.cache.length(request.seq_id):
            self.cache.truncate_to(request.seq_id, keep)
        self.cache.insert_prefix(request.seq_id, request.tokens)


class _Endless:
    """The plan of a cache that is never full."""

    def room(self, seq_id: int) -> int:
        """See `ReservationPlan.room`."""
        return sys.maxsize

    def take(self, seq_id: int, n: int) -> bool:
        """See `ReservationPlan.take`."""
        return True


def _take_in_turn(plan: ReservationPlan, chains: Sequence[Chain]) -> None:
    """Share what room there is behind what is fed, a position each in turn, and cut the drafts to it."""
    growing = [chain for chain in chains if chain.limit > 1]
    for length in range(1, max((chain.limit for chain in growing), default=0)):
        for chain in growing:
            if not plan.take(chain.request.seq_id, 1):
                chain.limit = length
        growing = [chain for chain in growing if chain.limit > length + 1]
