"""Which sequences feed how many tokens in a step. First come, first served.

There is no prefill and no decode: a sequence feeds what its cache has not seen, as far as the token
budget goes. One that is caught up but for its newest token may also carry a draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from speculant.cache.base import KVCache
from speculant.config import Limits
from speculant.types import Request


@dataclass(frozen=True)
class Scheduled:
    """`count` committed tokens of a request that this step feeds, from position `start` on."""

    request: Request
    start: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed."""
        return self.request.tokens[self.start : self.start + self.count]

    @property
    def completes(self) -> bool:
        """Whether the newest token is among them, so that a next one can be chosen."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def decodes(self) -> bool:
        """Whether only the newest token was missing, so that a draft may follow it."""
        return self.completes and self.count == 1


class Scheduler:
    """Keeps who waits and who runs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def admit(self, cache: KVCache) -> list[Request]:
        """Move waiting requests to running while there is room; return them.

        A sample whose first sibling still feeds their common prompt waits for it, to share the work;
        once that is done all others start together.
        """
        admitted: list[Request] = []
        while self.waiting and len(self.running) < self._limits.max_num_seqs:
            if self._waits_for_sibling(self.waiting[0], cache):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _waits_for_sibling(self, request: Request, cache: KVCache) -> bool:
        siblings = [other for other in self.running if other.request_id == request.request_id]
        return bool(siblings) and all(cache.length(other.seq) < len(request.prompt) for other in siblings)

    def schedule(self, cache: KVCache) -> list[Scheduled]:
        """Share the token budget: a token for everyone who is caught up first, then backlogs in order."""
        budget = self._limits.max_num_batched_tokens
        backlogs = {request.seq: len(request.tokens) - cache.length(request.seq) for request in self.running}
        counts = {seq: 1 for seq, backlog in backlogs.items() if backlog == 1}
        budget -= len(counts)
        for seq, backlog in backlogs.items():
            if seq not in counts and budget > 0:
                counts[seq] = min(backlog, budget)
                budget -= counts[seq]
        return [
            Scheduled(request, cache.length(request.seq), counts[request.seq])
            for request in self.running
            if request.seq in counts
        ]

    def draft_budget(self, scheduled: Sequence[Scheduled]) -> int:
        """Return how many draft nodes still fit into the step."""
        return self._limits.max_num_batched_tokens - sum(item.count for item in scheduled)
