"""The cost of a backlog: a drafter with a cache of its own first computes all tokens that it has not processed.

After a long prompt, this can take longer than the drafts of a short answer save.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from speculant.lengths.costs import StepCosts
from speculant.lengths.plan import Offer, Seconds
from speculant.types import Request

LEAST = 64  # missing tokens; fewer are part of a draft
BEGIN_SHARE = 0.2  # of the time that drafts are expected to save: they may be accepted less often than estimated
TRIAL_SHARE = 0.05  # of the time that a request needs without drafts, which its backlog may take for a trial


class Backlogs:
    """Tracks how much of each request drafters have processed."""

    def __init__(self, costs: StepCosts) -> None:
        self._readings = costs.readings
        self._seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def note(self, request: Request) -> int:
        """Record a draft for a request; return how many tokens it gained since its last draft."""
        count, self._seen[request] = len(request.tokens) - self._seen.get(request, 0), len(request.tokens)
        return count

    def seconds(self, method: str, request: Request) -> float:
        """Return the seconds of a request's backlog."""
        seen, length, reading = self._seen.get(request, 0), len(request.tokens), self._readings.get(method)
        return 0.0 if reading is None or length - seen < LEAST else reading.seconds(seen, length)

    def drop(
        self, method: str, requests: Sequence[Request], counts: list[int], offers: Sequence[Offer], seconds: Seconds
    ) -> list[int]:
        """Return `counts` without sequences whose backlog takes too large a share of the time that drafts save.

        offers, seconds: those that the numbers of nodes were chosen from; see `choose_jointly`.
        """
        waits = [self.seconds(method, request) if each else 0.0 for request, each in zip(requests, counts, strict=True)]
        if not any(waits):
            return counts
        left, gain, depth = list(counts), 0.0, 0
        for offer in offers:
            if offer.nodes <= left[offer.owner]:
                left[offer.owner] -= offer.nodes
                gain, depth = gain + offer.gain, max(depth, offer.depth)
        tokens, drafted = len(counts), sum(map(bool, counts))
        saved_s = seconds(0, 0, 0) - seconds(sum(counts), depth, drafted) * tokens / (tokens + gain)
        return self._within(requests, counts, waits, BEGIN_SHARE * saved_s / tokens)

    def affordable(self, method: str, requests: Sequence[Request], most: Sequence[int], plain_s: float) -> list[int]:
        """Return the nodes that a trial may have: none where the backlog takes much of the remaining time."""
        waits = [self.seconds(method, request) for request in requests]
        return self._within(requests, most, waits, TRIAL_SHARE * plain_s / len(requests))

    def _within(
        self, requests: Sequence[Request], counts: Sequence[int], waits: Sequence[float], token_s: float
    ) -> list[int]:
        """Return counts, 0 where a wait is longer than `token_s` for each token that a request may still get."""
        pairs = zip(requests, counts, waits, strict=True)
        return [count if wait <= token_s * _left(request) else 0 for request, count, wait in pairs]


def _left(request: Request) -> float:
    """Return the most tokens that a request may still get."""
    most = request.params.max_tokens
    return float("inf") if most is None else most - (request.num_positions - len(request.prompt))
