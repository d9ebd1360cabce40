"""The lengths with the most expected tokens per second, from past acceptance and the costs of steps on this machine.

A plan (plan.py) compares every number of draft nodes, 0 included, for the whole batch at once, by the costs of steps
(costs.py) and the estimated acceptance. It holds for some steps. What it leaves out is tried again by one schedule of
experiments. The engine calls, in each step that is not paused:

    choose  ->  drafts  ->  trim, prefers (drafts with scores)  ->  target pass  ->  observe
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np
from typing_extensions import override

from speculant.errors import ConfigError, suggest
from speculant.lengths.base import DraftLength, DraftLengthContext, DraftOutcome, ScoredDraft, num_rows
from speculant.lengths.costs import (
    LEARNT,
    LEAST_BACKLOG,
    ROW_SHARE,
    UNKNOWN_COSTS,
    Backlogs,
    CostCurve,
    Mean,
    StepCosts,
)
from speculant.lengths.plan import (
    Array,
    MethodAcceptance,
    Offers,
    StepPlan,
    asked_length,
    choose_jointly,
    choose_scored,
    most_nodes,
)
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from speculant.types import Request

PROBE = 1  # nodes of a draft that is tried
PLAIN_STEPS = 6  # of an experiment without drafts; its last half is timed, when the processor's caches are as usual
HOLDS, RESTS = 8, 64  # steps for which a plan holds, with drafts and without
PATIENCE = 8  # calls in a row without a draft, after which a method is only tried, at most once in RESTS steps
LOOKUP_MEMORY = 0.05  # weight of the newest call
BUDGET = 0.002  # of the time, for each experiment


@dataclass
class MethodRecord:
    """What is known of a method.

    has_scores: whether its last drafts had some. silent: its calls in a row that returned no draft. gain, seconds: of a
    call to a method with scores, which drafts nothing in most steps of an unfamiliar text: tokens accepted, without
    those of plain steps in the time that their verification takes, and the time for each sequence.
    """

    acceptance: MethodAcceptance = field(default_factory=MethodAcceptance)  # of drafts without scores
    scored: MethodAcceptance = field(default_factory=MethodAcceptance)
    has_scores: bool = False
    silent: int = 0
    gain: float = 1.0
    seconds: Mean = field(default_factory=Mean)


@dataclass
class MethodStep:
    """A method's outcomes in a step.

    asked: with the missing nodes that say something about the drafter. scored: there were drafts with scores; unscored:
    verified ones without. came: draft nodes or look-ahead rows were verified. forced: tokens of a sequence were forced.
    """

    asked: list[DraftOutcome] = field(default_factory=list)
    scored: bool = False
    unscored: bool = False
    came: bool = False
    forced: bool = False


@dataclass
class ObservedStep:
    """The outcomes of a step.

    rows: of drafts in the pass, among them those of forced tokens. accepted: drafted nodes. depth: of the deepest draft
    that was asked for. late: a drafter processed a backlog.
    """

    methods: defaultdict[str, MethodStep] = field(default_factory=lambda: defaultdict(MethodStep))
    drafted: bool = False
    forced: bool = False
    rows: int = 0
    forced_rows: int = 0
    accepted: int = 0
    depth: int = 0
    late: bool = False


class Experiments:
    """Now and then retries choices that did not pay or were measured long ago. step: the number of steps so far.

    An experiment has a kind and a method, such as ("draft", "ngram"). Its price is its expected cost, or its measured
    cost if that is lower, because the expectation may have been wrong. The unit is the time of a step without drafts.
    Each kind and method may cost the share BUDGET of the time, whatever the others cost: a costly experiment does not
    delay the others.
    """

    def __init__(self) -> None:
        self.step = 0
        self._due: dict[tuple[str, str], float] = {}  # the step from which one may begin again; at first LEARNT
        self._prices: dict[tuple[str, str], float] = {}  # expected, of those that have begun and not ended
        self._lost: dict[tuple[str, str], float] = {}  # by them so far

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
        trees: Callable[[str], tuple[int, int] | None] = lambda method: None,
        look_ahead_rows: Callable[[str], int] = lambda method: 0,
        selects: Callable[[str], bool] = lambda method: False,
    ) -> None:
        self._longest, self._trees, self._look_ahead_rows, self._selects = longest, trees, look_ahead_rows, selects
        self._costs = costs or StepCosts(CostCurve(UNKNOWN_COSTS))
        self._experiments, self._backlogs = Experiments(), Backlogs(self._costs)
        self._methods: defaultdict[str, MethodRecord] = defaultdict(MethodRecord)
        self._plan = StepPlan([], [], 0)
        self._met: WeakSet[Request] = WeakSet()  # whose texts were looked up at least once
        self._scores: dict[int, ScoredDraft] = {}  # of this step, by sequence id
        self._drawn: dict[int, int] = {}  # nodes that a model may draw, by sequence id, where this policy selects
        self._plain = PLAIN_STEPS  # steps since the last one with drafts

    @override
    def choose(self, schedule: Schedule) -> list[int]:
        plan, work = self._plan, [(item.request.seq_id, item.num_rows, item.decodes) for item in schedule.items]
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
        if (
            not plan.pure
            or plan.asked
            or self._experiments.runs("plain")
            or len(self._costs.passes.level.first) < LEARNT
        ):
            return 0
        steps = plan.left if self._plain > PLAIN_STEPS else min(plan.left, PLAIN_STEPS - self._plain)
        plan.left -= steps
        self._plain += steps
        self._experiments.step += steps
        return steps

    def _make(self, schedule: Schedule, work: list[tuple[int, int, bool]], before: StepPlan) -> StepPlan:
        """Return the plan of the next steps; work: see `StepPlan.made_for`."""
        plan, by_method = StepPlan.plain(schedule, work, self._costs, RESTS), dict[str, list[int]]()
        for place, (item, (_, _, decodes)) in enumerate(zip(schedule.items, work, strict=True)):
            request, method = item.request, item.request.drafts.method
            plan.pure = plan.pure and decodes and request.search is None
            if (asked := asked_length(request)) is not None or request.search is not None:
                plan.lengths[place] = self._most(request) if asked is None else asked
                plan.left = HOLDS
            elif decodes and method is not None:
                by_method.setdefault(method, []).append(place)
        self._drawn = {}
        if plan.pure and self._tries_plain(by_method, before):
            plan.left, plan.gain = PLAIN_STEPS, before.gain
            return plan
        for method, places in by_method.items():
            lengths = self._lengths(plan, method, [schedule.items[place].request for place in places])
            for place, length in zip(places, lengths, strict=True):
                plan.lengths[place] = length
        return plan

    def _tries_plain(self, methods: Collection[str], before: StepPlan) -> bool:
        """Whether to begin some steps without drafts: only they show how long they take."""
        self._experiments.end("plain")
        price = PLAIN_STEPS * before.gain / (1 + before.gain)
        if (
            not before.gain
            or all(self._methods[each].has_scores for each in methods)
            or self._experiments.left("plain")
        ):
            return False
        self._experiments.begin("plain", price=price)
        return True

    def _lengths(self, plan: StepPlan, method: str, requests: Sequence[Request]) -> list[int]:
        """Choose the lengths of one method's sequences.

        Sequences whose drafts have scores get the longest: their drafts are cut by the scores.
        """
        known, most = self._methods[method], [self._most(request) for request in requests]
        silent = known.silent >= PATIENCE
        if silent and not known.has_scores:
            most = [min(self._probe(method), each) for each in most]
        elif self._selects(method):
            lengths = self._joint_lengths(plan, method, requests, most)
            self._drawn |= {request.seq_id: each for request, each in zip(requests, lengths, strict=True)}
            if any(lengths):
                return most
        elif not known.has_scores:
            return self._joint_lengths(plan, method, requests, most)
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

    def _joint_lengths(
        self, plan: StepPlan, method: str, requests: Sequence[Request], most: Sequence[int]
    ) -> list[int]:
        """Choose the lengths of drafts without scores, or of an experiment with them."""
        own, count = self._look_ahead_rows(method), len(requests)
        pass_s = np.array(plan.steps_s(self._costs, num_rows(sum(most), own, count)))
        plain_s = float(pass_s[0])
        draft_s = self._costs.drafts_s(method, count, max(most, default=0))

        def seconds(nodes: Array, sequences: Array, depth: Array) -> Array:
            found: Array = pass_s[nodes + (nodes + sequences) * np.minimum(depth, own)] + draft_s[sequences, depth]
            return found

        def price(counts: Sequence[int]) -> float:
            return float(seconds(*map(np.array, (sum(counts), sum(map(bool, counts)), max(counts))))) / plain_s - 1

        experiments, trial, longer = self._experiments, ("draft", method), ("longer", method)
        chosen = choose_jointly(self._offers(method, requests, most), count, seconds)
        plan.rate = count / plain_s * (1 + chosen.gain)
        token_s = plain_s / count * chosen.gain / (1 + chosen.gain)
        counts, _ = self._backlogs.affordable(method, requests, chosen.counts, token_s)
        experiments.end(*longer)
        if any(counts):
            plan.gain, plan.left = max(plan.gain, chosen.gain), min(plan.left, HOLDS)
            plan.planned.append(method)
            twice = [min(2 * each, longest) for each, longest in zip(counts, most, strict=True)]
            if twice == counts or experiments.left(*longer):
                return counts
            experiments.begin(*longer, price=price(twice) - price(counts))
            plan.left = 1 + bool(own)
            return twice
        if not experiments.left(*trial):
            probes = [min(self._probe(method), each) for each in most]
            tried, wait_s = self._backlogs.affordable(method, requests, probes, plain_s / count)
            if any(tried):
                plan.planned.append(method)
                gain = self._expected(method, requests, tried) / count
                experiments.begin(*trial, price=max(0.0, price(tried) - gain) + wait_s / plain_s)
                plan.left = 1 + bool(own)  # look-ahead rows are computed a step before their draft
                return tried
        plan.left = min(plan.left, experiments.left(*trial) or RESTS)  # one that is due may not be affordable
        for request in requests:
            self._methods[method].acceptance.forget(request, plan.left)
        return counts

    def _probe(self, method: str) -> int:
        """Return how many nodes a draft has that is tried."""
        tree = self._trees(method)
        return tree[0] if tree else PROBE

    def _expected(self, method: str, requests: Sequence[Request], counts: Sequence[int]) -> float:
        """Return how many tokens of chains without scores are expected to be accepted."""
        acceptance = self._methods[method].acceptance
        return sum(sum(acceptance.survivals(each, count)) for each, count in zip(requests, counts, strict=True))

    def _offers(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> Offers:
        """Return the nodes that drafts without scores may have; chains end before one that is not worth its row."""
        acceptance, tree = self._methods[method].acceptance, self._trees(method)
        if tree is None or min(most) < tree[0]:
            pairs = zip(requests, most, strict=True)
            return Offers.of([acceptance.survivals(request, longest, ROW_SHARE) for request, longest in pairs])
        nodes, depth = tree
        return Offers.of([[sum(acceptance.survivals(request, depth))] for request in requests], depth, nodes)

    @override
    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        survivals, parents, most = list[list[float]](), list[Sequence[int]](), 0
        self._scores.clear()
        for draft in drafts:
            self._scores[draft.request.seq_id] = draft
            acceptance = self._methods[str(draft.request.drafts.method)].scored
            survivals.append(acceptance.scored_survivals(draft, ROW_SHARE))
            parents.append(draft.parents)
            most += len(survivals[-1])
        counts = choose_scored(survivals, parents, self._plan.steps_s(self._costs, most))
        for place, draft in enumerate(drafts):
            if asked_length(draft.request) is not None:
                counts[place] = len(draft.scores)
        return counts

    @override
    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Take the draft with the more expected tokens per second.

        Where a model would draw nothing, the deterministic draft is taken, and cut with those of the batch.
        """
        plan, method, length = self._plan, str(request.drafts.method), self._drawn.get(request.seq_id, 0)
        if not length or asked_length(request) is not None:
            return True
        draft_s = self._costs.drafts_s(method, sum(map(bool, self._drawn.values())), length)[-2:, length]
        drawn_s = float(draft_s[1] - draft_s[0])  # of one more sequence
        pass_s = plan.steps_s(self._costs, max(length, len(scores)))
        known = self._methods[method]
        drawn = sum(known.acceptance.survivals(request, length)) - plan.rate * (drawn_s + pass_s[length])
        draft, nodes, gain = ScoredDraft(request, scores, parents), 0, 0.0
        for survival in known.scored.scored_survivals(draft, ROW_SHARE):
            nodes, gain = nodes + 1, gain + survival
            if gain - plan.rate * pass_s[nodes] >= drawn:
                return True
        return False

    @override
    def longest_unscored(self, request: Request) -> int | None:
        return self._drawn.get(request.seq_id)

    def _most(self, request: Request) -> int:
        method = str(request.drafts.method)
        return most_nodes(request, self._longest, self._trees(method), self._look_ahead_rows(method))

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
            self._follow_method(method, step.methods[method])
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
            step.accepted += sum(outcome.accepted)
            if draft is None:
                own.unscored = True
                gained = sum(outcome.accepted[: sum(outcome.tested)])
                step.late = self._backlogs.note(request) > LEAST_BACKLOG + gained or step.late
        if nodes or method in self._plan.planned:
            known = self._methods[method]
            (known.acceptance if draft is None else known.scored).observe(outcome, draft)

    def _without_usual(self, outcome: DraftOutcome, method: str) -> DraftOutcome:
        """Return an outcome without the missing nodes that say nothing about its drafter.

        A model draws up to the length that this policy selected for it, look-ahead rows give as many as there are, and
        a tree may have fewer nodes at the same depth.
        """
        came = sum(outcome.drafted)
        most = self._drawn.get(outcome.request.seq_id, came + outcome.missing)
        fewer = self._look_ahead_rows(method) or (came and self._trees(method))
        return outcome._replace(missing=0 if fewer else max(0, most - came))

    def _follow_method(self, method: str, own: MethodStep) -> None:
        """Note whether a method was silent and whether its drafts have scores, and end its trial."""
        plan, known, ends = self._plan, self._methods[method], own.unscored
        if method in plan.planned or method in plan.asked:
            if own.came or own.scored:
                known.silent = 0
            elif (own.asked or not own.forced) and (method in plan.planned or known.silent >= PATIENCE):
                known.silent += 1
                ends = True
        if ends and self._experiments.end("draft", method):
            plan.left = 0
        if (own.scored or own.unscored) and own.scored != known.has_scores:
            known.has_scores = own.scored
            plan.left = 0

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
        if not own.unscored:  # else a model drafted as well
            known.seconds.add(draft_s / max(1, sum(map(bool, lengths))))
        silent = known.silent - PATIENCE
        self._experiments.end("look up", method, least=0 if silent < 0 else min(2**silent, RESTS))

    def _follow(self, step: ObservedStep, timing: StepTiming, draft_s: float) -> None:
        """Follow the costs of a step with drafts."""
        plan, rows = self._plan, step.rows
        attention_s = plan.attention.seconds(rows)
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
    own = context.trees, context.look_ahead_rows, context.selects
    return Adaptive(context.longest, context.costs(), *own)
