"""The cost of a backlog: a drafter with a cache of its own first computes all tokens that it has not processed.

After a long prompt, this can take longer than the drafts of a short answer save. The tokens of a source count too: the
encoder of a draft model reads them before the first draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from speculant.lengths.costs import StepCosts
from speculant.types import Request

LEAST = 8  # missing tokens; fewer are part of a draft


class Backlogs:
    """Tracks how much of each request drafters have processed."""

    def __init__(self, costs: StepCosts) -> None:
        self._readings = costs.readings
        self._seen: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def note(self, request: Request) -> int:
        """Record a draft for a request; return how many tokens it gained since its last draft."""
        length = _length(request)
        count, self._seen[request] = length - self._seen.get(request, 0), length
        return count

    def seconds(self, method: str, request: Request) -> float:
        """Return the seconds of a request's backlog."""
        seen, length, reading = self._seen.get(request, 0), _length(request), self._readings.get(method)
        return 0.0 if reading is None or length - seen < LEAST else reading.seconds(seen, length)

    def affordable(
        self, method: str, requests: Sequence[Request], counts: Sequence[int], token_s: float
    ) -> tuple[list[int], float]:
        """Return counts, 0 where a backlog takes longer than `token_s` for each token that a request may still get.

        The number is the seconds of the backlogs that are left.
        """
        left, total_s = list(counts), 0.0
        for place, request in enumerate(requests):
            if left[place]:
                wait_s = self.seconds(method, request)
                if wait_s <= token_s * _left(request):
                    total_s += wait_s
                else:
                    left[place] = 0
        return left, total_s


def _length(request: Request) -> int:
    """Return how many tokens a drafter processes, those of the source included."""
    return len(request.source) + len(request.tokens)


def _left(request: Request) -> float:
    """Return the most tokens that a request may still get."""
    most = request.params.max_tokens
    return float("inf") if most is None else most - (request.num_positions - len(request.prompt))
