"""A drafter that continues drafts of another one: it is given shadows of requests, in which drafted tokens follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculant.drafting.combine.composite import CompositeDrafter, Member
from speculant.models.base import Chain
from speculant.types import CommittedRows, DraftTree, Request


@dataclass(eq=False)
class Shadow(Request):
    """A copy of a request with tokens of its own: the committed ones, then drafted ones.

    The first `agreed` tokens are known to be committed. A shadow has no constraint: what it forbids is guessed in vain.
    """

    agreed: int = 0


def shadow_of(request: Request) -> Shadow:
    """Return a shadow with the request's tokens. Draws on it use shared noise, as its drafts need no probs."""
    return Shadow(
        seq_id=request.seq_id,
        request_id=request.request_id,
        index=request.index,
        prompt=request.prompt,
        params=request.params,
        seed=request.seed,
        end_token_ids=request.end_token_ids,
        metrics=request.metrics,
        cache_salt=request.cache_salt,
        prediction=request.prediction,
        tokens=list(request.tokens),
        agreed=len(request.tokens),
    )


class ShadowedDrafter:
    """Lets a drafter guess what a draft model draws next. Its errors cost guesses and go to `count`."""

    def __init__(self, member: Member, vocab_size: int, count: Callable[[int], None]) -> None:
        self.drafter = CompositeDrafter([member], vocab_size, count)
        self._shadows: dict[int, Shadow] = {}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._shadows[request.seq_id] = shadow = shadow_of(request)
        self.drafter.begin(shadow)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        shadow = self._shadows.pop(request.seq_id, None)
        if shadow is not None:
            self.drafter.end(shadow)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        self.drafter.catch_up([self._committed(request) for request in requests])

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self.drafter.observe(self._committed(request), rows)

    def guess(self, chains: Sequence[Chain]) -> list[DraftTree]:
        """Return, for each chain, a guess of the tokens that it draws next; see `Guess`."""
        pairs = [(self._drafted(chain), chain.limit - len(chain.tokens) - 1) for chain in chains]
        (member,) = self.drafter.members
        guesses = self.drafter.ask(member, pairs)
        return [guesses.get(chain.request.seq_id, DraftTree.empty()) for chain in chains]

    def _drafted(self, chain: Chain) -> Shadow:
        """Return a request's shadow with the tokens of its draft so far."""
        if not chain.tokens:
            return self._committed(chain.request)
        shadow = self._shadows[chain.request.seq_id]
        shadow.extend(chain.tokens[len(shadow.tokens) - len(chain.request.tokens) :])
        shadow.num_drafted = len(chain.tokens)
        return shadow

    def _committed(self, request: Request) -> Shadow:
        """Return a request's shadow with exactly the committed tokens; drafted ones that differ are rolled back."""
        shadow = self._shadows[request.seq_id]
        most = min(len(shadow.tokens), len(request.tokens))
        keep = min(shadow.agreed, most)
        while keep < most and shadow.tokens[keep] == request.tokens[keep]:
            keep += 1
        dropped = shadow.tokens[keep:]
        if dropped:
            shadow.shorten(keep)
            self.drafter.roll_back(shadow, dropped)
        shadow.extend(request.tokens[keep:])
        shadow.agreed, shadow.rounds, shadow.num_drafted = len(request.tokens), request.rounds, 0
        shadow.finish_reason = request.finish_reason
        return shadow
