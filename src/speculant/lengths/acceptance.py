"""Estimates of the probability that a drafted token is accepted once its predecessor is.

They come from past steps alone: by depth for a method that gives no scores, by score for one that does, and each
sequence's own rate in proportion.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import mul
from weakref import WeakKeyDictionary

from speculant.lengths.base import DraftOutcome, ScoredDraft
from speculant.types import Request

PRIOR, PRIOR_TESTS = 0.7, 4.0  # of a method that has drafted nothing yet
DEPTH_PRIOR_TESTS = 8.0  # tests at a depth that weigh as much as the rate at the depth above
METHOD_MEMORY, SEQUENCE_MEMORY = 0.99, 0.9  # the weight that each test leaves to earlier tests
SEQUENCE_PRIOR_TESTS = 30.0  # tests of a sequence that weigh as much as its method's rate
SCORE_PRIOR_TESTS = 4.0  # tests of a score that weigh as much as the score itself
BUCKETS = 10  # of scores from 0 to 1; the last one has 1 as well


@dataclass
class Rate:
    """Accepted over tested, where older tests count less."""

    prior: float
    prior_tests: float
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
        """Reduce the weight of the tests so far."""
        self.accepted, self.tested = memory * self.accepted, memory * self.tested


class MethodAcceptance:
    """The estimates of one method."""

    def __init__(self) -> None:
        self._whole = Rate(PRIOR, PRIOR_TESTS)
        self._by_depth: list[Rate] = []
        rates = [Rate((bucket + 0.5) / BUCKETS, SCORE_PRIOR_TESTS) for bucket in range(BUCKETS)]
        self._by_score = [*rates, rates[-1]]
        self._score_rates = [rate.value for rate in self._by_score]
        self._by_sequence: WeakKeyDictionary[Request, Rate] = WeakKeyDictionary()

    def survivals(self, request: Request, length: int, least: float = 0.0) -> list[float]:
        """Return estimates that each of a chain's first `length` tokens is accepted together with all before it.

        They end before the first one below `least`.
        """
        share, rates = self._share(request), self._rates(length) or [PRIOR]
        factors = [min(1.0, share * rate) for rate in rates]
        factors += [factors[-1]] * (length - len(factors))
        return list(takewhile(least.__le__, accumulate(factors[:length], mul)))

    def scored_survivals(self, draft: ScoredDraft, least: float) -> list[float]:
        """Return the estimate that each node of a draft with scores is accepted, up to the first one below `least`."""
        share, survivals = self._share(draft.request), list[float]()
        rates = [min(1.0, share * rate) for rate in self._score_rates]
        for score, parent in zip(draft.scores, draft.parents, strict=True):
            survival = rates[int(score * BUCKETS)] * (survivals[parent] if parent >= 0 else 1.0)
            if survival < least:
                break
            survivals.append(survival)
        return survivals

    def observe(self, outcome: DraftOutcome, draft: ScoredDraft | None) -> None:
        """Count the outcome of a draft; draft: its scores, None = it has none.

        If a draft without scores is accepted whole and nodes are missing, the next one counts as rejected: lengths are
        chosen before it is known what comes.
        """
        request, tests = outcome.request, [*outcome.accepted[: sum(outcome.tested)]]
        if outcome.missing and draft is None and sum(outcome.accepted) == len(outcome.drafted):
            tests.append(0)
        own = self._by_sequence.get(request)
        if own is None:
            own = self._by_sequence[request] = Rate(self._whole.value, SEQUENCE_PRIOR_TESTS)
        if draft is None:
            while len(self._by_depth) < len(tests):
                self._by_depth.append(Rate(PRIOR, DEPTH_PRIOR_TESTS if self._by_depth else PRIOR_TESTS))
            for rate, accepted in zip(self._by_depth, tests, strict=False):
                rate.add(accepted, METHOD_MEMORY)
        else:
            for score, accepted in tested_scores(draft, outcome):
                self._by_score[int(score * BUCKETS)].add(accepted, METHOD_MEMORY)
            self._score_rates = [rate.value for rate in self._by_score]
        self._whole.add(sum(tests), METHOD_MEMORY, len(tests))
        own.add(sum(tests), SEQUENCE_MEMORY, len(tests))

    def forget(self, request: Request, steps: int) -> None:
        """Move the rate of a sequence without drafts towards its method's, by a number of steps."""
        if (own := self._by_sequence.get(request)) is not None:
            own.forget(SEQUENCE_MEMORY**steps)

    def _rates(self, length: int) -> list[float]:
        """Return the estimates at the first `length` depths; few tests at a depth weigh less than the depth above."""
        rates = list[float]()
        for rate in self._by_depth[:length]:
            rate.prior = rates[-1] if rates else PRIOR
            rates.append(rate.value)
        return rates

    def _share(self, request: Request) -> float:
        """Return a sequence's rate in proportion to its method's."""
        own = self._by_sequence.get(request)
        if own is None:
            return 1.0
        own.prior = self._whole.value
        return own.value / self._whole.value


def tested_scores(draft: ScoredDraft, outcome: DraftOutcome) -> list[tuple[float, bool]]:
    """Return for each node that was compared with the target's token its score, and whether it was accepted.

    These are the children of the root and of the accepted nodes: the siblings of an accepted node were rejected.
    """
    path, kept = set(outcome.path), sum(outcome.drafted)
    expanded = {-1, *outcome.path[: max(0, sum(outcome.tested) - 1)]} if any(outcome.tested) else ()
    nodes = enumerate(zip(draft.scores[:kept], draft.parents, strict=False))
    return [(score, node in path) for node, (score, parent) in nodes if parent in expanded]
