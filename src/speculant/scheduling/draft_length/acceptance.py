"""Estimates of the probability that a drafted token is accepted once its predecessor is.

They come from past steps alone: by depth for a method that gives no scores, by score for one that does, and each
sequence's own rate in proportion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from weakref import WeakKeyDictionary

from speculant.scheduling.draft_length.base import DraftOutcome, ScoredDraft
from speculant.types import Request

PRIOR, PRIOR_TESTS = 0.7, 2.0  # of a method that has drafted nothing yet
METHOD_MEMORY, SEQUENCE_MEMORY = 0.995, 0.9  # what a test leaves of the tests before it
SEQUENCE_PRIOR_TESTS = 15.0  # how many tests of its own outweigh what is known of its method
HIGHEST = 0.995
BUCKETS = 10  # of scores


@dataclass
class Rate:
    """Accepted over tested, where older tests count less."""

    prior: float = PRIOR
    prior_tests: float = PRIOR_TESTS
    accepted: float = 0.0
    tested: float = 0.0

    @property
    def value(self) -> float:
        """The estimate."""
        return (self.accepted + self.prior * self.prior_tests) / (self.tested + self.prior_tests)

    def add(self, accepted: int, memory: float, tested: int = 1) -> None:
        """Count tests."""
        kept = memory if tested == 1 else memory**tested
        self.accepted = kept * self.accepted + accepted
        self.tested = kept * self.tested + tested

    def forget(self, memory: float) -> None:
        """Let the tests so far count less."""
        self.accepted, self.tested = memory * self.accepted, memory * self.tested


class MethodAcceptance:
    """The estimates of one method."""

    def __init__(self) -> None:
        self._whole = Rate()
        self._by_depth: list[Rate] = []
        self._by_score = [Rate((bucket + 0.5) / BUCKETS, 4.0) for bucket in range(BUCKETS)]
        self._by_sequence: WeakKeyDictionary[Request, Rate] = WeakKeyDictionary()

    def survivals(self, request: Request, length: int, least: float = 0.0) -> list[float]:
        """Return estimates that each of a chain's first `length` tokens is accepted together with all before it.

        They end before the first one below `least`.
        """
        share, rates = self._share(request), [rate.value for rate in self._by_depth[:length]] or [PRIOR]
        factors = [min(HIGHEST, share * rate) for rate in rates]
        factors += [factors[-1]] * (length - len(factors))
        return list(takewhile(least.__le__, accumulate(factors[:length], mul)))

    def scored_survivals(self, draft: ScoredDraft) -> list[float]:
        """Return the estimate that each node of a draft with scores is accepted."""
        share, survivals = self._share(draft.request), list[float]()
        rates = [rate.value for rate in self._by_score]
        for score, parent in zip(draft.scores, draft.parents, strict=True):
            before = survivals[parent] if parent >= 0 else 1.0
            survivals.append(before * min(HIGHEST, share * rates[bucket_of(score)]))
        return survivals

    def observe(self, request: Request, tests: Sequence[int], scores: Sequence[tuple[float, bool]]) -> None:
        """Count a draft's tests, 1 = accepted, from the root's child down, and those of nodes with scores."""
        own = self._by_sequence.get(request)
        if own is None:
            own = self._by_sequence[request] = Rate(self._whole.value, SEQUENCE_PRIOR_TESTS)
        while len(self._by_depth) < len(tests):
            self._by_depth.append(Rate(self._by_depth[-1].value if self._by_depth else PRIOR))
        for rate, accepted in zip(self._by_depth, tests, strict=False):
            rate.accepted = METHOD_MEMORY * rate.accepted + accepted  # as `add`, which takes longer
            rate.tested = METHOD_MEMORY * rate.tested + 1
        for score, accepted in scores:
            self._by_score[bucket_of(score)].add(accepted, METHOD_MEMORY)
        self._whole.add(sum(tests), METHOD_MEMORY, len(tests))
        own.add(sum(tests), SEQUENCE_MEMORY, len(tests))

    def forget(self, request: Request, steps: int) -> None:
        """Let a sequence that is not drafted for in so many steps return to its method's rate."""
        if (own := self._by_sequence.get(request)) is not None:
            own.forget(SEQUENCE_MEMORY**steps)

    def _share(self, request: Request) -> float:
        """Return a sequence's rate in proportion to its method's."""
        own = self._by_sequence.get(request)
        if own is None:
            return 1.0
        own.prior = self._whole.value
        return own.value / self._whole.value


def bucket_of(score: float) -> int:
    """Return the bucket of a score from 0 to 1."""
    return min(int(score * BUCKETS), BUCKETS - 1)


def tested_scores(draft: ScoredDraft, outcome: DraftOutcome) -> list[tuple[float, bool]]:
    """Return for each node that was compared with the target's token its score, and whether it was accepted.

    These are the children of the root and of the accepted nodes: the siblings of an accepted node were rejected.
    """
    kept, path, tests = sum(outcome.drafted), outcome.path, list[tuple[float, bool]]()
    parents = draft.parents[:kept]
    for depth in range(sum(outcome.tested)):
        parent = path[depth - 1] if depth else -1
        accepted = path[depth] if depth < len(path) else None
        tests += [(draft.scores[node], node == accepted) for node, each in enumerate(parents) if each == parent]
    return tests


class Acceptance(defaultdict[str, MethodAcceptance]):
    """The estimates by method."""

    def __init__(self) -> None:
        super().__init__(MethodAcceptance)
