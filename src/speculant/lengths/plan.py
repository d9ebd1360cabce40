"""The plan of a step: for the whole batch, the draft nodes with the most expected tokens per second.

Estimates of the probability that a drafted token is accepted once its predecessor is come from past steps alone: by
depth for a method that gives no scores, by score for one that does, and each sequence's own rate in proportion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import truediv
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from speculant.lengths.base import DraftOutcome, ScoredDraft
from speculant.lengths.costs import NO_ATTENTION, AttentionSeconds, StepCosts
from speculant.scheduling import Schedule
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

    def add_each(self, tests: Iterable[int], memory: float) -> float:
        """Count tests one after the other, and return the estimate."""
        for accepted in tests:
            self.accepted, self.tested = memory * self.accepted + accepted, memory * self.tested + 1
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
            by_bucket = defaultdict[int, list[bool]](list)
            for score, accepted in tested_scores(draft, outcome):
                by_bucket[min(int(score * BUCKETS), BUCKETS - 1)].append(accepted)
            for bucket, own_tests in by_bucket.items():
                self._score_rates[bucket] = self._by_score[bucket].add_each(own_tests, METHOD_MEMORY)
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


Array = np.ndarray[Any, Any]
Seconds = Callable[[Array, Array, Array], Array]
LONGEST = 16  # nodes of a draft unless the user sets a number


@dataclass
class StepPlan:
    """The lengths of a step's sequences, and for how many more steps they hold.

    made_for: for each sequence its id, its rows without a draft, and whether it only decodes. rows: the sum of these
    rows. attention: the seconds of long texts, and of each node after them.
    pure: whether all sequences only decode, and none is a beam search. gain: the share by which drafts without scores
    are expected to raise the tokens per second; rate: these tokens per second. planned: methods without
    scores that draft. asked: methods that are called because they may draft. seconds: of the step by nodes, as far as
    they are known; none after the costs have changed.
    """

    made_for: list[tuple[int, int, bool]]
    lengths: list[int]
    rows: int
    attention: AttentionSeconds = NO_ATTENTION
    pure: bool = True
    left: int = 0
    gain: float = 0.0
    rate: float = 0.0
    planned: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def plain(cls, schedule: Schedule, made_for: list[tuple[int, int, bool]], costs: StepCosts, left: int) -> StepPlan:
        """Return the plan that drafts nothing for a number of steps."""
        rows, keys = list[int](), list[int]()
        for (_, own, _), item in zip(made_for, schedule.items, strict=True):
            rows.append(own)
            keys.append(item.start + item.count)
        return cls(made_for, [0] * len(rows), sum(rows), costs.attention(rows, keys), left=left)

    def steps_s(self, costs: StepCosts, most: int) -> list[float]:
        """Return the seconds of the step with 0 to at least `most` nodes, without drafting."""
        if len(self.seconds) <= most:
            self.seconds = costs.steps_s(self.rows, len(self.lengths), max(most, LONGEST), self.attention)
        return self.seconds


def choose_scored(
    survivals: Sequence[Sequence[float]], parents: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[int]:
    """Choose how many nodes of each draft to verify, from its first one on.

    survivals: estimates that the first nodes of each draft are accepted. parents: those of all its nodes, which come
    parents first, likeliest first. seconds: of steps with 0, 1, ... nodes.
    """
    if len(survivals) == 1:
        rates = list(map(truediv, accumulate(survivals[0], initial=1.0), seconds))
        return [rates.index(max(rates))]
    offers, costs = Offers.of(survivals), np.array(seconds)
    return choose_jointly(offers, len(survivals), lambda nodes, sequences, depth: costs[nodes]).counts


class Offers(NamedTuple):
    """Nodes by which the drafts of a step could grow, in arrays with an entry for each; those of a sequence in order.

    gain: the probability that it is accepted, or the expected tokens of a whole tree. depth: 1 for the root's children.
    owner: the place of its sequence. nodes: of each. seconds(nodes, sequences, depth): see `choose_jointly`.
    """

    gain: Array
    depth: Array
    owner: Array
    nodes: int = 1

    @classmethod
    def of(cls, survivals: Sequence[Sequence[float]], depth: int = 0, nodes: int = 1) -> Offers:
        """Return the offers of sequences, from the estimates that each node is accepted with all before it.

        depth: of all offers; 0 = a chain's nodes are one below the other.
        """
        sizes = list(map(len, survivals))
        gain = np.fromiter(chain.from_iterable(survivals), float, sum(sizes))
        depths = np.full(len(gain), depth) if depth else np.concatenate([np.arange(1, size + 1) for size in sizes])
        return cls(gain, depths, np.repeat(np.arange(len(sizes)), sizes), nodes)


class Chosen(NamedTuple):
    """The nodes of each sequence, and by which share they raise the tokens per second."""

    counts: list[int]
    gain: float


def choose_jointly(offers: Offers, sequences: int, seconds: Seconds) -> Chosen:
    """Choose which offers to draft.

    seconds(nodes, sequences, depth): arrays of the time of steps with so many nodes in drafts of a depth for some of
    the sequences. For each greatest depth, offers are taken in the order of their gain, and all numbers of them are
    compared, because costs have cliffs.
    """
    if not len(offers.gain):
        return Chosen([0] * sequences, 0.0)
    order = np.argsort(-offers.gain, kind="stable")
    depth, owner, most = offers.depth[order], offers.owner[order], int(offers.depth.max())
    caps = np.arange(1, most + 1)[:, None] if sequences > 1 and offers.nodes == 1 else np.array([[most]])
    taken = depth <= caps
    gain = np.where(taken, offers.gain[order], 0.0).cumsum(axis=1)
    begun = (taken & _firsts(owner)).cumsum(axis=1)
    deepest = np.minimum(caps, np.maximum.accumulate(depth))
    rates = (sequences + gain) / seconds(taken.cumsum(axis=1) * offers.nodes, begun, deepest)
    cap, last = divmod(int(rates.argmax()), len(order))
    none = np.zeros(1, int)
    share = float(rates[cap, last] * seconds(none, none, none)[0] / sequences - 1)
    if share <= 0:
        return Chosen([0] * sequences, 0.0)
    counts = np.bincount(owner[: last + 1][taken[cap, : last + 1]], minlength=sequences) * offers.nodes
    return Chosen(counts.tolist(), share)


def _firsts(values: Array) -> Array:
    """Return for each value whether it is the first of its kind."""
    firsts = np.zeros(len(values), bool)
    firsts[np.unique(values, return_index=True)[1]] = True
    return firsts


def most_nodes(request: Request, longest: int | None, tree: tuple[int, int] | None, look_ahead_rows: int = 0) -> int:
    """Return the most nodes of a draft: the request's number, else the user's, else a whole tree, or LONGEST.

    tree: nodes and depth of the trees of a method that drafts whole ones. look_ahead_rows: those of a method that
    drafts from them bound its nodes; 0 = it has none.
    """
    asked = request.drafts.num_tokens if request.drafts.num_tokens is not None else longest
    most = asked if asked is not None else tree[0] if tree else LONGEST
    return min(most, look_ahead_rows) if look_ahead_rows else most


def asked_length(request: Request) -> int | None:
    """Return the number of draft tokens that a request sets itself; the cost does not change it."""
    speculation = request.params.speculation
    return speculation.get("num_speculative_tokens") if isinstance(speculation, Mapping) else None
