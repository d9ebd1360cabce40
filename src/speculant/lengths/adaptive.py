"""The lengths with the most expected tokens per second, from past acceptance and the costs of steps on this machine.

A plan compares every number of draft nodes, 0 included, for the whole batch at once, by the costs of steps (costs.py)
and the estimated acceptance. It holds for some steps. What it leaves out is tried again by one schedule of experiments.
The engine calls, in each step that is not paused:

    choose  ->  drafts  ->  trim, prefers (drafts with scores)  ->  target pass  ->  observe

Estimates of the probability that a drafted token is accepted once its predecessor is come from past steps alone: by
depth for a method that gives no scores, by score for one that does, and each sequence's own rate in proportion.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, repeat
from operator import attrgetter, mul, sub, truediv
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from typing_extensions import override

from speculant.drafting import DrafterNeeds
from speculant.errors import ConfigError, suggest
from speculant.lengths.base import LONGEST, DraftLength, DraftLengthContext, DraftOutcome, ScoredDraft, num_rows
from speculant.lengths.costs import (
    LEARNT,
    LEAST_BACKLOG,
    NO_ATTENTION,
    ROW_SHARE,
    UNKNOWN_COSTS,
    AttentionSeconds,
    Backlogs,
    CostCurve,
    Mean,
    StepCosts,
)
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from speculant.types import DraftPrice, Request

PROBE = 1  # nodes of a draft that is tried
LONGEST_ALONE = 32  # of a draft with scores, which cut it, where no other sequence waits for its rows
PLAIN_STEPS = 6  # of an experiment without drafts; its last half is timed, when the processor's caches are as usual
HOLDS, RESTS = 8, 64  # steps for which a plan holds, with drafts and without
PATIENCE = 8  # calls in a row without a draft, after which a method is only tried, at most once in RESTS steps
LOOKUP_MEMORY = 0.05  # weight of the newest call
BUDGET = 0.002  # of the time, for each experiment
PRIOR, PRIOR_TESTS = 0.7, 4.0  # of a method that has drafted nothing yet
CHAIN_PRIOR_TESTS = 16.0  # chains that weigh as much as the prior
DEPTH_PRIOR_TESTS = 8.0  # tests at a depth that weigh as much as the rate at the depth above
METHOD_MEMORY, SEQUENCE_MEMORY = 0.99, 0.9  # the weight that each test leaves to earlier tests
SEQUENCE_PRIOR_TESTS = 30.0  # tests of a sequence that weigh as much as its method's rate
SCORE_PRIOR_TESTS = 4.0  # tests of a score that weigh as much as the score itself
LEAST_FURTHER = 0.1  # fewest tokens after a chain's first that the price of a token assumes
BUCKETS = 10  # of scores from 0 to 1; the last one has 1 as well


class Rate:
    """Accepted over tested, where older tests count less.

    prior: the estimate without tests, which weighs as much as `prior_tests`. value: the estimate.
    """

    __slots__ = ("accepted", "prior", "prior_tests", "tested", "value")

    def __init__(self, prior: float, prior_tests: float) -> None:
        self.prior, self.prior_tests, self.accepted, self.tested, self.value = prior, prior_tests, 0.0, 0.0, prior

    def add(self, accepted: int, memory: float, tested: int = 1) -> None:
        """Count tests."""
        kept = memory if tested == 1 else memory**tested
        self.accepted, self.tested = kept * self.accepted + accepted, kept * self.tested + tested
        self.value = (self.accepted + self.prior * self.prior_tests) / (self.tested + self.prior_tests)


class MethodAcceptance:
    """The estimates of one method: of all tests, by depth, by score, and by sequence."""

    def __init__(self) -> None:
        self._whole, self._depths = Rate(PRIOR, PRIOR_TESTS), [Rate(PRIOR, PRIOR_TESTS)]
        self._scores = [Rate((bucket + 0.5) / BUCKETS, SCORE_PRIOR_TESTS) for bucket in range(BUCKETS)]
        self._by_sequence: WeakKeyDictionary[Request, Rate] = WeakKeyDictionary()

    def survivals(self, request: Request, length: int, least: float = 0.0) -> list[float]:
        """Return estimates that each of a chain's first `length` tokens is accepted together with all before it.

        They end before the first one below `least`.
        """
        share, last, survival, survivals = self.share(request), len(self._depths) - 1, 1.0, list[float]()
        for depth in range(length):
            survival *= min(1.0, share * self._depths[min(depth, last)].value)
            if survival < least:
                break
            survivals.append(survival)
        return survivals

    def scored_survivals(self, draft: ScoredDraft, least: float) -> list[float]:
        """Return the estimate that each node of a draft with scores is accepted, up to the first one below `least`."""
        share, survivals = self.share(draft.request), list[float]()
        for score, parent in zip(draft.scores, draft.parents, strict=True):
            rate = min(1.0, share * self._scores[min(int(score * BUCKETS), BUCKETS - 1)].value)
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
            own = self._by_sequence[request] = Rate(self._whole.value, SEQUENCE_PRIOR_TESTS)
        if draft is None:
            self._observe_depths(tests)
        else:
            self._observe_scores(draft, outcome)
        self._whole.add(sum(tests), METHOD_MEMORY, len(tests))
        own.add(sum(tests), SEQUENCE_MEMORY, len(tests))

    def _observe_depths(self, tests: Sequence[int]) -> None:
        """Count tests at the first depths; few tests at a depth weigh less than the rate at the depth above."""
        while len(self._depths) < len(tests):
            self._depths.append(Rate(PRIOR, DEPTH_PRIOR_TESTS))
        above = PRIOR
        for depth, rate in enumerate(self._depths):
            if depth < len(tests):  # as `add`, without a call for each depth
                rate.accepted = METHOD_MEMORY * rate.accepted + tests[depth]
                rate.tested = METHOD_MEMORY * rate.tested + 1
            above = rate.value = (rate.accepted + above * rate.prior_tests) / (rate.tested + rate.prior_tests)

    def _observe_scores(self, draft: ScoredDraft, outcome: DraftOutcome) -> None:
        """Count the nodes that were compared with the target's token, by their scores.

        These are the children of the root and of the accepted nodes: the siblings of an accepted node were rejected.
        """
        path, kept = set(outcome.path), sum(outcome.drafted)
        expanded = {-1, *outcome.path[: max(0, sum(outcome.tested) - 1)]} if any(outcome.tested) else ()
        for node, (score, parent) in enumerate(zip(draft.scores[:kept], draft.parents, strict=False)):
            if parent in expanded:
                self._scores[min(int(score * BUCKETS), BUCKETS - 1)].add(node in path, METHOD_MEMORY)

    def share(self, request: Request) -> float:
        """Return a sequence's rate in proportion to its method's."""
        own = self._by_sequence.get(request)
        if own is None:
            return 1.0
        rate = self._whole.value
        return (own.accepted + rate * SEQUENCE_PRIOR_TESTS) / (own.tested + SEQUENCE_PRIOR_TESTS) / rate


Array = np.ndarray[Any, Any]
Seconds = Callable[[Array, Array, Array], Array]


@dataclass
class StepPlan:
    """The lengths of a step's sequences, and for how many more steps they hold.

    made_for: for each sequence its id, its rows without a draft, and whether it only decodes. rows: the sum of these
    rows. attention: the seconds of long texts, and of each node after them.
    pure: whether all sequences only decode, and none is a beam search. gain: the share by which drafts without scores
    are expected to raise the tokens per second; rate: these tokens per second. planned: methods without
    scores that draft. asked: methods that are called because they may draft. given: sequences whose requests set the
    length themselves. extended: the most nodes of a method's chains, where these end by their scores. seconds: of the
    step by nodes, as far as they are known; none after the costs have changed.
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
    given: set[int] = field(default_factory=set)
    extended: list[int] = field(default_factory=list)

    def steps_s(self, costs: StepCosts, most: int) -> list[float]:
        """Return the seconds of the step with 0 to at least `most` nodes, without drafting."""
        if len(self.seconds) <= most:
            self.seconds = costs.steps_s(self.rows, len(self.lengths), max(most, LONGEST), self.attention)
        return self.seconds


def choose_scored(survivals: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[int]:
    """Choose how many nodes of each draft to verify, from its first one on.

    survivals: estimates that the first nodes of each draft, the likeliest ones, are accepted. seconds: of steps with
    0, 1, ... nodes.
    """
    if len(survivals) == 1:
        rates = list(map(truediv, accumulate(survivals[0], initial=1.0), seconds))
        return [rates.index(max(rates))]
    offers, costs = Offers.of(survivals), np.array(seconds)
    return choose_jointly(offers, len(survivals), lambda nodes, sequences, depth: costs[nodes]).counts


class Offers(NamedTuple):
    """Nodes by which the drafts of a step could grow, in arrays with an entry each; a sequence's nodes are in order.

    gain: a node's probability of acceptance, or the expected tokens of a whole tree. depth: 1 for the root's children.
    owner: the place of the sequence. nodes: per offer. seconds(nodes, sequences, depth): see `choose_jointly`.
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

    seconds(nodes, sequences, depth): arrays of the time of steps that draft this many nodes, to this depth, for some of
    the sequences. For each greatest depth, offers are taken in the order of their gain, and all numbers of offers are
    compared, because costs have cliffs.
    """
    if not len(offers.gain):
        return Chosen([0] * sequences, 0.0)
    order = np.argsort(-offers.gain, kind="stable")
    depth, owner, most = offers.depth[order], offers.owner[order], int(offers.depth.max())
    caps = np.arange(1, most + 1)[:, None] if sequences > 1 and offers.nodes == 1 else np.array([[most]])
    taken, firsts = depth <= caps, np.zeros(len(order), bool)
    firsts[np.unique(owner, return_index=True)[1]] = True
    gain = np.where(taken, offers.gain[order], 0.0).cumsum(axis=1)
    begun = (taken & firsts).cumsum(axis=1)
    deepest = np.minimum(caps, np.maximum.accumulate(depth))
    rates = (sequences + gain) / seconds(taken.cumsum(axis=1) * offers.nodes, begun, deepest)
    cap, last = divmod(int(rates.argmax()), len(order))
    none = np.zeros(1, int)
    share = float(rates[cap, last] * seconds(none, none, none)[0] / sequences - 1)
    if share <= 0:
        return Chosen([0] * sequences, 0.0)
    counts = np.bincount(owner[: last + 1][taken[cap, : last + 1]], minlength=sequences) * offers.nodes
    return Chosen(counts.tolist(), share)


@dataclass
class MethodRecord:
    """What is known of a method.

    needs: its drafter's. price: of its chains, which end by their scores; None = they do not.
    has_scores: whether its last drafts had some. silent: its calls in a row that returned no draft. gain, seconds: of a
    call to a method with scores, which drafts nothing in most steps of an unfamiliar text: tokens accepted, less
    the tokens that plain steps make while they are verified, and the time for each sequence. looked_up:
    the share of tokens that come with drafts with scores. gained, nodes, depth: means for drafts without scores, of
    the accepted tokens, the nodes, and the nodes of a step's longest draft.
    """

    needs: DrafterNeeds
    price: DraftPrice | None = None
    acceptance: MethodAcceptance = field(default_factory=MethodAcceptance)  # of drafts without scores
    scored: MethodAcceptance = field(default_factory=MethodAcceptance)
    has_scores: bool = False
    silent: int = 0
    gain: float = 1.0
    seconds: Mean = field(default_factory=Mean)
    looked_up: Rate = field(default_factory=partial(Rate, 0.0, CHAIN_PRIOR_TESTS))
    gained: Rate = field(default_factory=partial(Rate, PRIOR, CHAIN_PRIOR_TESTS))
    nodes: Rate = field(default_factory=partial(Rate, 1.0, CHAIN_PRIOR_TESTS))
    depth: Rate = field(default_factory=partial(Rate, 1.0, CHAIN_PRIOR_TESTS))

    @property
    def tree(self) -> tuple[int, int] | None:
        """Nodes and depth of the usual tree; None = it drafts chains, or nodes with scores."""
        nodes, depth = self.needs.usual_nodes, self.needs.tree_depth
        return None if nodes is None or depth is None else (nodes, depth)

    @property
    def probe(self) -> int:
        """How many nodes a draft has that is tried."""
        return self.tree[0] if self.tree else PROBE

    @property
    def usual(self) -> tuple[int, int, float]:
        """The nodes of a usual draft without scores, the depth of a batch of them, and the tokens accepted of one."""
        size = math.ceil(self.nodes.value)
        return size, max(size, round(self.depth.value)), self.gained.value / self.nodes.value * size


class MethodRecords(dict[str, MethodRecord]):
    """The record of each method; see `DraftLengthContext`."""

    def __init__(self, needs: Callable[[str], DrafterNeeds], price: Callable[[str], DraftPrice | None]) -> None:
        super().__init__()
        self._needs, self._price = needs, price

    def __missing__(self, method: str) -> MethodRecord:
        needs = self._needs(method)
        self[method] = made = MethodRecord(needs, self._price(method) if needs.stops else None)
        return made


@dataclass
class MethodStep:
    """A method's outcomes in a step.

    asked: with the missing nodes that say something about the drafter. scored: there were drafts with scores. nodes: of
    the largest verified draft without. came: draft nodes or look-ahead rows were verified. forced: tokens of a sequence
    were forced.
    """

    asked: list[DraftOutcome] = field(default_factory=list)
    scored: bool = False
    came: bool = False
    forced: bool = False
    nodes: int = 0


@dataclass
class ObservedStep:
    """The outcomes of a step.

    rows: of drafts in the pass, forced tokens included. accepted: drafted nodes. depth: of the deepest draft
    that was asked for. late: a drafter processed a backlog.
    """

    methods: defaultdict[str, MethodStep] = field(default_factory=partial(defaultdict, MethodStep))
    drafted: bool = False
    forced: bool = False
    rows: int = 0
    forced_rows: int = 0
    accepted: int = 0
    depth: int = 0
    late: bool = False


_WORK, _SEQ_ID = attrgetter("request.seq_id", "num_rows", "decodes"), attrgetter("seq_id")


class Experiments:
    """Now and then retries choices that did not pay or were measured long ago. step: the number of steps so far.

    An experiment has a kind and a method, such as ("draft", "ngram"). Its price is its expected cost, or its measured
    cost if that is lower, because the expectation may have been wrong. The unit is the time of a step without drafts.
    Each kind and method may cost the share BUDGET of the time, whatever the others cost: a costly experiment does not
    delay the others.
    """

    def __init__(self) -> None:
        self.step = 0
        self._due: dict[tuple[str, str], float] = {}  # the step from which each may begin again; at first LEARNT
        self._prices: dict[tuple[str, str], float] = {}  # expected, of experiments that have begun and not ended
        self._lost: dict[tuple[str, str], float] = {}  # by experiments so far

    def left(self, kind: str, method: str = "") -> int:
        """Return the steps until an experiment may begin; 0 = now."""
        return max(0, math.ceil(self._due.get((kind, method), LEARNT)) - self.step)

    def runs(self, kind: str, method: str = "") -> bool:
        """Whether an experiment has begun and not ended."""
        return (kind, method) in self._prices

    def begin(self, kind: str, method: str = "", *, price: float) -> None:
        """Begin an experiment. price: its expected cost, in plain steps."""
        self._prices[kind, method] = price

    def lose(self, plain_steps: float) -> None:
        """Add the cost of a step to the experiments that run; it is negative if the step was faster than expected."""
        for name in self._prices:
            self._lost[name] = self._lost.get(name, 0.0) + plain_steps

    def end(self, kind: str, method: str = "", least: int = 0) -> bool:
        """End an experiment; return whether it ran. least: the fewest steps until the next one."""
        expected = self._prices.pop((kind, method), None)
        if expected is None:
            return False
        price = max(0.0, min(expected, self._lost.pop((kind, method), expected)))
        self._due[kind, method] = self.step + max(least, price / BUDGET)
        return True


class Adaptive(DraftLength):
    """See the module's docstring, and `DraftLengthContext` for the arguments. costs: None = unknown."""

    def __init__(
        self,
        longest: int | None = None,
        costs: StepCosts | None = None,
        needs: Callable[[str], DrafterNeeds] = lambda method: DrafterNeeds(),
        price: Callable[[str], DraftPrice | None] = lambda method: None,
    ) -> None:
        self._longest, self._methods = longest, MethodRecords(needs, price)
        self._costs = costs or StepCosts(CostCurve(UNKNOWN_COSTS))
        self._experiments, self._backlogs = Experiments(), Backlogs(self._costs)
        self._plan = StepPlan([], [], 0)
        self._met: WeakSet[Request] = WeakSet()  # whose texts were looked up at least once
        self._scores: dict[int, ScoredDraft] = {}  # of this step, by sequence id
        self._drawn: dict[int, int] = {}  # the most nodes that a model draws, by sequence id, where this policy selects
        self._plain = PLAIN_STEPS  # steps since the last one with drafts

    @override
    def choose(self, schedule: Schedule) -> list[int]:
        plan, work = self._plan, list(map(_WORK, schedule.items))
        if not plan.left or plan.made_for != work:
            plan = self._plan = self._make(schedule, work, plan)
        plan.left -= 1
        self._experiments.step += 1
        self._scores.clear()
        return plan.lengths

    @override
    def pause(self) -> int:
        """Pause until a plain step is as usual and is timed, then until the plan's last step."""
        plan = self._plan
        learnt = len(self._costs.passes.level.first) >= LEARNT
        if plan.asked or not (plan.pure and learnt) or self._experiments.runs("plain"):
            return 0
        steps = plan.left if self._plain > PLAIN_STEPS else min(plan.left, PLAIN_STEPS - self._plain)
        plan.left -= steps
        self._plain += steps
        self._experiments.step += steps
        return steps

    def _make(self, schedule: Schedule, work: list[tuple[int, int, bool]], before: StepPlan) -> StepPlan:
        """Return the plan of the next steps; work: see `StepPlan.made_for`."""
        rows, keys, by_method = list[int](), list[int](), dict[str, dict[int, Request]]()
        for (_, own, _), item in zip(work, schedule.items, strict=True):
            rows.append(own)
            keys.append(item.start + item.count)
        plan = StepPlan(work, [0] * len(rows), sum(rows), self._costs.attention(rows, keys), left=RESTS)
        for place, item in enumerate(schedule.items):
            request, method, given = item.request, item.request.drafts.method, item.request.params.speculation
            asked = given.get("num_speculative_tokens") if isinstance(given, Mapping) else None
            plan.pure = plan.pure and item.decodes and request.search is None
            if asked is not None or request.search is not None:
                plan.lengths[place] = self._most(request) if asked is None else asked
                plan.left = HOLDS
                if asked is not None:
                    plan.given.add(request.seq_id)
            elif item.decodes and method is not None:
                by_method.setdefault(method, {})[place] = request
        self._drawn = {}
        for known in self._methods.values():
            if known.price is not None:
                known.price.least = 0.0
        if plan.pure and self._tries_plain(by_method, before):
            plan.left, plan.gain = PLAIN_STEPS, before.gain
            return plan
        for method, requests in by_method.items():
            for place, length in zip(requests, self._lengths(plan, method, [*requests.values()]), strict=True):
                plan.lengths[place] = length
        return plan

    def _tries_plain(self, methods: Collection[str], before: StepPlan) -> bool:
        """Whether to begin some steps without drafts: only they show how long they take."""
        self._experiments.end("plain")
        scored = all(self._methods[each].has_scores for each in methods)
        if scored or not before.gain or self._experiments.left("plain"):
            return False
        self._experiments.begin("plain", price=PLAIN_STEPS * before.gain / (1 + before.gain))
        return True

    def _lengths(self, plan: StepPlan, method: str, requests: Sequence[Request]) -> list[int]:
        """Choose the lengths of one method's sequences.

        Sequences whose drafts have scores get the longest: their drafts are cut by the scores.
        """
        known, most = self._methods[method], [self._most(request) for request in requests]
        silent = known.silent >= PATIENCE
        if silent and not known.has_scores:
            most = [min(known.probe, each) for each in most]
        elif known.needs.selects:
            lengths = self._joint_lengths(plan, method, requests, most)
            self._drawn.update(zip(map(_SEQ_ID, requests), plan.extended or lengths, strict=True))
            if any(lengths):
                return self._longest_scored(plan, requests, most)
        elif not known.has_scores:
            lengths = self._joint_lengths(plan, method, requests, most)
            return plan.extended or lengths
        most = self._longest_scored(plan, requests, most)
        price = len(requests) * known.seconds.value / plan.steps_s(self._costs, 0)[0]
        if silent or known.gain < len(requests) * price:  # a token takes a share of its pass
            if wait := self._experiments.left("look up", method):
                plan.left = min(plan.left, wait)
                most = [0 if request in self._met else each for request, each in zip(requests, most, strict=True)]
                if not any(most):  # else a new text may repeat a finished one
                    return most
            else:
                self._experiments.begin("look up", method, price=price)
            plan.left = 1
        self._met.update(requests)
        plan.left = min(plan.left, HOLDS)
        plan.asked.append(method)
        return most

    def _longest_scored(self, plan: StepPlan, requests: Sequence[Request], most: list[int]) -> list[int]:
        """Return the most nodes of drafts with scores, if those without have at most `most`."""
        is_given = self._longest is not None or requests[0].drafts.num_tokens is not None
        return most if is_given or len(plan.lengths) > 1 or most != [LONGEST] else [LONGEST_ALONE]

    def _joint_lengths(
        self, plan: StepPlan, method: str, requests: Sequence[Request], most: Sequence[int]
    ) -> list[int]:
        """Choose the lengths of drafts without scores, or of an experiment with them."""
        plan.extended = []
        known, count = self._methods[method], len(requests)
        own = known.needs.target_inputs
        pass_s = np.array(plan.steps_s(self._costs, num_rows(count * (1 + max(most, default=0)), own, count)))
        plain_s = float(pass_s[0])
        draft_s = self._costs.drafts_s(method, count, 1 + max(most, default=0))

        def seconds(nodes: Array, sequences: Array, depth: Array) -> Array:
            found: Array = pass_s[nodes + (nodes + sequences) * np.minimum(depth, own)] + draft_s[sequences, depth]
            return found

        def prices(*choices: Sequence[int]) -> list[float]:
            table = np.array(choices)
            return list(map(float, seconds(table.sum(1), np.count_nonzero(table, 1), table.max(1)) / plain_s - 1))

        experiments, trial, longer = self._experiments, ("draft", method), ("longer", method)
        chosen = choose_jointly(self._offers(method, requests, most), count, seconds)
        plan.rate = count / plain_s * (1 + chosen.gain)
        # A step with prompts is long, and drafts in it are cheap: it does not show whether reading a backlog pays.
        model_s = plain_s / count * (1 - known.looked_up.value)  # of a plain token that no lookup finds
        token_s = model_s * chosen.gain / (1 + chosen.gain) if plan.pure else 0.0
        counts, _ = self._backlogs.affordable(method, requests, chosen.counts, token_s)
        experiments.end(*longer)
        experiments.end(*trial)
        if any(counts):
            plan.gain, plan.left = max(plan.gain, chosen.gain), min(plan.left, HOLDS)
            plan.planned.append(method)
            self._set_price(plan, known, counts, most, seconds)
            twice = [min(2 * each, longest) for each, longest in zip(counts, most, strict=True)]
            if plan.extended or twice == counts or experiments.left(*longer):
                return counts
            of_twice, of_counts = prices(twice, counts)
            experiments.begin(*longer, price=of_twice - of_counts)
            plan.left = 1 + bool(own)
            return twice
        if not experiments.left(*trial):
            probes = [min(known.probe, each) for each in most]
            tried, wait_s = self._backlogs.affordable(method, requests, probes, model_s, most_s=plain_s)
            if any(tried):
                plan.planned.append(method)
                gain = sum(map(sum, map(known.acceptance.survivals, requests, tried))) / count
                experiments.begin(*trial, price=max(0.0, prices(tried)[0] - gain) + wait_s / plain_s)
                # Look-ahead rows are computed a step before their draft, and a late draft does not show its cost.
                plan.left = 1 + bool(own or wait_s)
                return tried
        plan.left = min(plan.left, experiments.left(*trial) or RESTS)  # one that is due may not be affordable
        return counts

    @staticmethod
    def _set_price(
        plan: StepPlan, known: MethodRecord, counts: Sequence[int], most: Sequence[int], seconds: Seconds
    ) -> None:
        """Set the price of a further token, in tokens, for chains that end by their scores.

        A chain's limit is the length that would be best if every token were accepted.
        """
        if known.price is None or plan.given:
            return
        drawn, size = len(counts) - counts.count(0), min(known.usual[0], max(most))
        longest = np.minimum.outer(np.arange(1, 1 + max(most)), most) * np.array(counts, bool)
        nodes, depths, sequences = longest.sum(1), longest.max(1), np.full(len(longest), drawn)
        plan.extended = longest[((len(counts) + nodes) / seconds(nodes, sequences, depths)).argmax()].tolist()
        few, many = size // 2, size + 1
        few_s, many_s, deeper_s = seconds(
            drawn * np.array([few, many, many]), sequences[:1], np.array([1, 1, 2])
        ).tolist()
        alone = max(1.0, (known.depth.value - 1) / max(LEAST_FURTHER, known.nodes.value - 1))
        token_s = max(0.0, alone * (deeper_s - many_s) + (many_s - few_s) / (many - few))
        known.price.least = plan.rate * token_s / drawn

    def _offers(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> Offers:
        """Return the nodes that drafts without scores may have; chains end before one that is not worth its row."""
        known, acceptance = self._methods[method], self._methods[method].acceptance
        tree, (size, depth, gain) = known.tree, known.usual
        if known.price is not None and min(most) >= size:
            gains, depth = [[gain * acceptance.share(request)] for request in requests], min(depth, max(most))
            return Offers.of(gains, depth, size)
        if tree is None or min(most) < tree[0]:
            return Offers.of([acceptance.survivals(*each, ROW_SHARE) for each in zip(requests, most, strict=True)])
        nodes, depth = tree
        return Offers.of([[sum(acceptance.survivals(request, depth))] for request in requests], depth, nodes)

    @override
    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        survivals, most = list[list[float]](), 0
        self._scores.clear()
        for draft in drafts:
            self._scores[draft.request.seq_id] = draft
            acceptance = self._methods[str(draft.request.drafts.method)].scored
            survivals.append(acceptance.scored_survivals(draft, ROW_SHARE))
            most += len(survivals[-1])
        counts = choose_scored(survivals, self._plan.steps_s(self._costs, most))
        for place, draft in enumerate(drafts):
            if draft.request.seq_id in self._plan.given:
                counts[place] = len(draft.scores)
        return counts

    @override
    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Take the draft with the more expected tokens per second.

        Where a model would draw nothing, the deterministic draft is taken, and cut with the batch's other drafts.
        """
        plan, method = self._plan, str(request.drafts.method)
        if not self._drawn.get(request.seq_id):
            return True
        if self._experiments.runs("draft", method):
            return False  # the model is tried
        known, drawn = self._methods[method], sum(map(bool, self._drawn.values()))
        length, _, gain = known.usual
        gain *= known.acceptance.share(request)
        if known.price is None:
            length = self._drawn[request.seq_id]
            gain = sum(known.acceptance.survivals(request, length))
        draft_s = self._costs.drafts_s(method, drawn, length)
        drawn_s = float(draft_s[drawn, length] - draft_s[drawn - 1, length])  # of one more sequence
        pass_s = plan.steps_s(self._costs, max(length, len(scores)))
        worth = gain - plan.rate * (drawn_s + pass_s[length])
        gains = accumulate(known.scored.scored_survivals(ScoredDraft(request, scores, parents), ROW_SHARE))
        return max(map(sub, gains, map(mul, pass_s[1:], repeat(plan.rate))), default=-math.inf) >= worth

    @override
    def longest_unscored(self, request: Request) -> int | None:
        return self._drawn.get(request.seq_id)

    def _most(self, request: Request) -> int:
        """Return the most nodes of a draft: the request's number, else the user's, else a whole tree, or LONGEST."""
        known, most = self._methods[str(request.drafts.method)], request.drafts.num_tokens
        most = self._longest if most is None else most
        if most is None:
            most = known.tree[0] if known.tree else LONGEST
        return min(most, known.needs.target_inputs) if known.needs.target_inputs else most

    @override
    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        plan, step = self._plan, ObservedStep()
        for draft in self._scores.values():
            step.methods[str(draft.request.drafts.method)].scored = True
        for outcome in outcomes:
            self._count(step, outcome)
        draft_s, rows = timing.draft_s, step.forced_rows
        step_s, gained = draft_s + timing.verify_s + timing.rest_s, 1 + step.accepted / max(1, len(plan.lengths))
        self._experiments.lose(step_s / plan.steps_s(self._costs, rows)[rows] * (1 + plan.gain) - gained)
        for method in {*plan.planned, *plan.asked, *step.methods}:
            self._follow_method(method, step.methods[method], step.late)
        for method in plan.asked:
            self._note_lookups(method, step.methods[method], draft_s)
        if step.drafted:
            self._plain = 0
            if plan.pure:
                self._follow(step, timing, draft_s)
        elif plan.pure and plan.lengths and not (any(plan.lengths) or step.forced):
            self._follow_plain(timing)

    def _count(self, step: ObservedStep, outcome: DraftOutcome) -> None:
        """Count an outcome, and learn from it how likely the method's drafts are accepted."""
        request, method, nodes = outcome.request, str(outcome.request.drafts.method), sum(outcome.drafted)
        own, rows = step.methods[method], nodes + outcome.look_ahead_rows
        step.rows += rows
        if outcome.forced:
            own.forced = step.forced = True
            step.forced_rows += rows
            return
        if outcome.missing:
            outcome = self._without_usual(outcome, method)
        draft = self._scores.get(request.seq_id)
        own.asked.append(outcome)
        own.came = own.came or rows > 0
        step.depth = max(step.depth, len(outcome.drafted) + outcome.missing)
        if nodes:
            step.drafted = True
            step.accepted += (accepted := sum(outcome.accepted))
            if self._methods[method].needs.selects:
                self._methods[method].looked_up.add(accepted * (draft is not None), METHOD_MEMORY, 1 + accepted)
            if draft is None:
                own.nodes = max(own.nodes, nodes)
                gained = sum(outcome.accepted[: sum(outcome.tested)])
                self._methods[method].gained.add(gained, METHOD_MEMORY)
                self._methods[method].nodes.add(nodes, METHOD_MEMORY)
                step.late = self._backlogs.note(request) > LEAST_BACKLOG + gained or step.late
        if nodes or method in self._plan.planned:
            known = self._methods[method]
            (known.acceptance if draft is None else known.scored).observe(outcome, draft)

    def _without_usual(self, outcome: DraftOutcome, method: str) -> DraftOutcome:
        """Return an outcome without the missing nodes that say nothing about its drafter.

        A model draws up to the length that this policy selected for it, look-ahead rows give as many as there are, and
        a tree may have fewer nodes at the same depth.
        """
        came, known = sum(outcome.drafted), self._methods[method]
        if known.price is not None and known.price.least and came:
            return outcome._replace(missing=0)
        most = self._drawn.get(outcome.request.seq_id, came + outcome.missing)
        fewer = known.needs.target_inputs or (came and known.tree)
        return outcome._replace(missing=0 if fewer else max(0, most - came))

    def _follow_method(self, method: str, own: MethodStep, late: bool) -> None:
        """Note whether a method was silent and whether its drafts have scores, and end its trial.

        late: its draft processed a backlog, and does not show what drafts cost; the trial's next step does.
        """
        plan, known, ends = self._plan, self._methods[method], own.nodes > 0
        if method in plan.planned or method in plan.asked:
            if own.came or own.scored:
                known.silent = 0
            elif (own.asked or not own.forced) and (method in plan.planned or known.silent >= PATIENCE):
                known.silent += 1
                ends = True
        if own.nodes:
            known.depth.add(own.nodes, METHOD_MEMORY)
        if ends and not (late and plan.left) and self._experiments.end("draft", method):
            plan.left = 0
        if (own.scored or own.nodes) and own.scored != known.has_scores:
            known.has_scores = own.scored
            plan.left = plan.left if known.needs.selects else 0

    def _note_lookups(self, method: str, own: MethodStep, draft_s: float) -> None:
        """Update the gain and the time of a call to a method with scores."""
        known, lengths, accepted, nodes = self._methods[method], self._plan.lengths, 0, 0
        for outcome in own.asked:
            if outcome.drafted and outcome.request.seq_id in self._scores:
                accepted += sum(outcome.accepted)
                nodes += sum(outcome.drafted)
        steps_s = self._plan.steps_s(self._costs, nodes)
        lost = (steps_s[nodes] / steps_s[0] - 1) * len(lengths)
        known.gain += LOOKUP_MEMORY * (accepted - lost - known.gain)
        if not own.nodes:  # else a model drafted as well
            known.seconds.add(draft_s / max(1, sum(map(bool, lengths))))
        silent = known.silent - PATIENCE
        self._experiments.end("look up", method, least=0 if silent < 0 else min(2**silent, RESTS))

    def _follow(self, step: ObservedStep, timing: StepTiming, draft_s: float) -> None:
        """Follow the costs of a step with drafts."""
        plan, rows = self._plan, step.rows
        attention_s = plan.attention.plain_s + rows * plan.attention.node_s
        self._costs.observe_step(self._experiments.step, plan.rows + rows, len(plan.lengths), timing, attention_s)
        asked = [(method, len(own.asked)) for method, own in step.methods.items() if own.asked]
        if len(asked) == 1 and not (step.late or step.forced or (self._scores and self._drawn)):
            self._costs.observe_draft(*asked[0], step.depth, draft_s)
        plan.seconds = []

    def _follow_plain(self, timing: StepTiming) -> None:
        """Follow the costs of a step without drafts."""
        plan, tries = self._plan, self._experiments.runs("plain")
        self._plain += 1
        if self._plain > (PLAIN_STEPS // 2 if tries else PLAIN_STEPS):
            self._costs.observe_plain(self._experiments.step, plan.rows, len(plan.lengths), timing, plan.attention)
            plan.seconds = []


def build(context: DraftLengthContext) -> Adaptive:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", suggest(key, ["policy"]))
    return Adaptive(context.longest, context.costs(), context.needs, context.price)
