"""Estimates of the probability that a drafted token is accepted once its predecessor is.

They come from past steps alone: by depth for a method that gives no scores, by score for one that does, and each
sequence's own rate in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from speculant.lengths.base import DraftOutcome, ScoredDraft
from speculant.types import Request

PRIOR, PRIOR_TESTS = 0.7, 4.0  # of a method that has drafted nothing yet
DEPTH_PRIOR_TESTS = 8.0  # tests at a depth that weigh as much as the rate at the depth above
METHOD_MEMORY, SEQUENCE_MEMORY = 0.99, 0.9  # the weight that each test leaves to earlier tests
SEQUENCE_PRIOR_TESTS = 30.0  # tests of a sequence that weigh as much as its method's rate
SCORE_PRIOR_TESTS = 4.0  # tests of a score that weigh as much as the score itself
BUCKETS = 10  # of scores from 0 to 1; the last one has 1 as well


class Rate:
    """Accepted over tested, where older tests count less.

    prior: the estimate without tests, which weighs as much as `prior_tests`.
    """

    __slots__ = ("accepted", "prior", "prior_tests", "tested")

    def __init__(self, prior: float, prior_tests: float) -> None:
        self.prior, self.prior_tests, self.accepted, self.tested = prior, prior_tests, 0.0, 0.0

    def add(self, accepted: int, memory: float, tested: int = 1) -> float:
        """Count tests, and return the estimate."""
        kept = memory if tested == 1 else memory**tested
        self.accepted, self.tested = kept * self.accepted + accepted, kept * self.tested + tested
        return (self.accepted + self.prior * self.prior_tests) / (self.tested + self.prior_tests)


class MethodAcceptance:
    """The estimates of one method."""

    def __init__(self) -> None:
        self._whole, self._rate = Rate(PRIOR, PRIOR_TESTS), PRIOR  # of all tests, and its estimate
        self._by_depth, self._depth_rates = list[Rate](), [PRIOR]
        self._score_rates = [(bucket + 0.5) / BUCKETS for bucket in range(BUCKETS)]
        self._by_score = [Rate(prior, SCORE_PRIOR_TESTS) for prior in self._score_rates]
        self._by_sequence: WeakKeyDictionary[Request, Rate] = WeakKeyDictionary()

    def survivals(self, request: Request, length: int, least: float = 0.0) -> list[float]:
        """Return estimates that each of a chain's first `length` tokens is accepted together with all before it.

        They end before the first one below `least`.
        """
        share, rates, survival, survivals = self._share(request), self._depth_rates, 1.0, list[float]()
        for depth in range(length):
            survival *= min(1.0, share * rates[min(depth, len(rates) - 1)])
            if survival < least:
                break
            survivals.append(survival)
        return survivals

    def scored_survivals(self, draft: ScoredDraft, least: float) -> list[float]:
        """Return the estimate that each node of a draft with scores is accepted, up to the first one below `least`."""
        share, rates, survivals = self._share(draft.request), self._score_rates, list[float]()
        for score, parent in zip(draft.scores, draft.parents, strict=True):
            rate = min(1.0, share * rates[min(int(score * BUCKETS), BUCKETS - 1)])
            survival = rate * (survivals[parent] if parent >= 0 else 1.0)
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
            own = self._by_sequence[request] = Rate(self._rate, SEQUENCE_PRIOR_TESTS)
        if draft is None:
            self._observe_depths(tests)
        else:
            for score, accepted in tested_scores(draft, outcome):
                bucket = min(int(score * BUCKETS), BUCKETS - 1)
                self._score_rates[bucket] = self._by_score[bucket].add(accepted, METHOD_MEMORY)
        self._rate = self._whole.add(sum(tests), METHOD_MEMORY, len(tests))
        own.add(sum(tests), SEQUENCE_MEMORY, len(tests))

    def _observe_depths(self, tests: Sequence[int]) -> None:
        """Count tests at the first depths; few tests at a depth weigh less than the rate at the depth above."""
        while len(self._by_depth) < len(tests):
            self._by_depth.append(Rate(PRIOR, DEPTH_PRIOR_TESTS if self._by_depth else PRIOR_TESTS))
        above, rates = PRIOR, list[float]()
        for depth, rate in enumerate(self._by_depth):
            rate.prior = above
            if depth < len(tests):  # as `add`, without a call for each depth
                rate.accepted, rate.tested = (
                    METHOD_MEMORY * rate.accepted + tests[depth],
                    METHOD_MEMORY * rate.tested + 1,
                )
            above = (rate.accepted + above * rate.prior_tests) / (rate.tested + rate.prior_tests)
            rates.append(above)
        self._depth_rates = rates or [PRIOR]

    def forget(self, request: Request, steps: int) -> None:
        """Move the rate of a sequence without drafts towards its method's, by a number of steps."""
        if (own := self._by_sequence.get(request)) is not None:
            own.accepted *= SEQUENCE_MEMORY**steps
            own.tested *= SEQUENCE_MEMORY**steps

    def _share(self, request: Request) -> float:
        """Return a sequence's rate in proportion to its method's."""
        own = self._by_sequence.get(request)
        if own is None:
            return 1.0
        return (own.accepted + self._rate * SEQUENCE_PRIOR_TESTS) / (own.tested + SEQUENCE_PRIOR_TESTS) / self._rate


def tested_scores(draft: ScoredDraft, outcome: DraftOutcome) -> list[tuple[float, bool]]:
    """Return for each node that was compared with the target's token its score, and whether it was accepted.

    These are the children of the root and of the accepted nodes: the siblings of an accepted node were rejected.
    """
    path, kept = set(outcome.path), sum(outcome.drafted)
    expanded = {-1, *outcome.path[: max(0, sum(outcome.tested) - 1)]} if any(outcome.tested) else ()
    nodes = enumerate(zip(draft.scores[:kept], draft.parents, strict=False))
    return [(score, node in path) for node, (score, parent) in nodes if parent in expanded]
