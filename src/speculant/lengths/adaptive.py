"""The lengths with the most expected tokens per second, from past acceptance and the costs of steps on this machine.

A plan (plan.py) compares every number of draft nodes, 0 included, for the whole batch at once, by the costs of steps
(costs.py) and the estimated acceptance (acceptance.py). It holds for some steps. What it leaves out is tried again by
one schedule of experiments (explore.py). The engine calls, in each step that is not paused:

    choose  ->  drafts  ->  trim, prefers (drafts with scores)  ->  target pass  ->  observe
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakSet

import numpy as np

from speculant.errors import ConfigError, suggest
from speculant.lengths.acceptance import MethodAcceptance
from speculant.lengths.backlog import LEAST, Backlogs
from speculant.lengths.base import DraftLengthContext, DraftOutcome, ScoredDraft, num_rows
from speculant.lengths.costs import LEARNT, ROW_SHARE, UNKNOWN_COSTS, CostCurve, Mean, StepCosts
from speculant.lengths.explore import Experiments
from speculant.lengths.plan import (
    Array,
    Offers,
    StepPlan,
    asked_length,
    choose_jointly,
    choose_scored,
    identity_of,
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


@dataclass
class Lookups:
    """What a call of a method with scores gains, which drafts nothing in most steps of an unfamiliar text.

    gain: tokens accepted, without those of plain steps in the time that their verification takes. seconds: the time of
    a call, for each sequence.
    """

    gain: float = 1.0
    seconds: Mean = field(default_factory=Mean)


class Adaptive:
    """See the module's docstring, and `DraftLengthContext` for the arguments. costs: None = unknown."""

    keeps_up = False

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
        self._acceptance: defaultdict[str, MethodAcceptance] = defaultdict(MethodAcceptance)
        self._plan = StepPlan([], [], 0)
        self._lookups: defaultdict[str, Lookups] = defaultdict(Lookups)
        self._silent = Counter[str]()  # each method's calls in a row that returned no draft
        self._met: WeakSet[Request] = WeakSet()  # whose texts were looked up at least once
        self._scored: set[str] = set()  # methods whose last drafts had scores
        self._scores: dict[int, ScoredDraft] = {}  # of this step, by sequence id
        self._drawn: dict[int, int] = {}  # nodes that a model may draw, by sequence id, where this policy selects
        self._plain = PLAIN_STEPS  # steps since the last one with drafts

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        plan = self._plan
        if not plan.left or plan.made_for != identity_of(schedule):
            plan = self._plan = self._make(schedule, plan)
        plan.left -= 1
        self._experiments.step += 1
        self._scores.clear()
        return plan.lengths

    def pause(self) -> int:
        """See `PausingLength.pause`: until a plain step is as usual and is timed, then until the plan's last step."""
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

    def _make(self, schedule: Schedule, before: StepPlan) -> StepPlan:
        """Return the plan of the next steps."""
        plan, by_method = StepPlan.plain(schedule, self._costs, RESTS), dict[str, list[int]]()
        for place, item in enumerate(schedule.items):
            request, method = item.request, item.request.drafter
            plan.pure = plan.pure and item.decodes and request.search is None
            if (asked := asked_length(request)) is not None or request.search is not None:
                plan.lengths[place] = self._most(request) if asked is None else asked
                plan.left = HOLDS
            elif item.decodes and method is not None:
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
        if not before.gain or self._scored.issuperset(methods) or self._experiments.left("plain"):
            return False
        self._experiments.begin("plain", price=price)
        return True

    def _lengths(self, plan: StepPlan, method: str, requests: Sequence[Request]) -> list[int]:
        """Choose the lengths of one method's sequences.

        Sequences whose drafts have scores get the longest: their drafts are cut by the scores.
        """
        most, silent = [self._most(request) for request in requests], self._silent[method] >= PATIENCE
        if silent and method not in self._scored:
            most = [min(self._probe(method), each) for each in most]
        elif self._selects(method):
            lengths = self._joint_lengths(plan, method, requests, most)
            self._drawn |= {request.seq_id: each for request, each in zip(requests, lengths, strict=True)}
            if any(lengths):
                return most
        elif method not in self._scored:
            return self._joint_lengths(plan, method, requests, most)
        lookups = self._lookups[method]
        price = len(requests) * lookups.seconds.value / plan.steps_s(self._costs, 0)[0]
        if silent or lookups.gain < len(requests) * price:  # a token takes a share of its pass
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
            self._acceptance[method].forget(request, plan.left)
        return counts

    def _probe(self, method: str) -> int:
        """Return how many nodes a draft has that is tried."""
        tree = self._trees(method)
        return tree[0] if tree else PROBE

    def _expected(self, method: str, requests: Sequence[Request], counts: Sequence[int]) -> float:
        """Return how many tokens of chains without scores are expected to be accepted."""
        acceptance = self._acceptance[method]
        return sum(sum(acceptance.survivals(each, count)) for each, count in zip(requests, counts, strict=True))

    def _offers(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> Offers:
        """Return the nodes that drafts without scores may have; chains end before one that is not worth its row."""
        acceptance, tree = self._acceptance[method], self._trees(method)
        if tree is None or min(most) < tree[0]:
            pairs = zip(requests, most, strict=True)
            return Offers.of([acceptance.survivals(request, longest, ROW_SHARE) for request, longest in pairs])
        nodes, depth = tree
        return Offers.of([[sum(acceptance.survivals(request, depth))] for request in requests], depth, nodes)

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """See `TrimmingLength.trim`."""
        self._scores = {draft.request.seq_id: draft for draft in drafts}
        survivals = [self._scored_survivals(draft) for draft in drafts]
        pass_s = self._plan.steps_s(self._costs, sum(map(len, survivals)))
        counts = choose_scored(survivals, [each.parents for each in drafts], pass_s)
        for place, draft in enumerate(drafts):
            if asked_length(draft.request) is not None:
                counts[place] = len(draft.scores)
        return counts

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """See `Selector.prefers`: the draft with the more expected tokens per second is taken.

        Where a model would draw nothing, the deterministic draft is taken, and cut with those of the batch.
        """
        plan, method, length = self._plan, str(request.drafter), self._drawn.get(request.seq_id, 0)
        if not length or asked_length(request) is not None:
            return True
        draft_s = self._costs.drafts_s(method, sum(map(bool, self._drawn.values())), length)[-2:, length]
        drawn_s = float(draft_s[1] - draft_s[0])  # of one more sequence
        pass_s = plan.steps_s(self._costs, max(length, len(scores)))
        drawn = sum(self._acceptance[method].survivals(request, length)) - plan.rate * (drawn_s + pass_s[length])
        gains = accumulate(self._scored_survivals(ScoredDraft(request, scores, parents)))
        return any(gain - plan.rate * pass_s[nodes] >= drawn for nodes, gain in enumerate(gains, start=1))

    def longest_unscored(self, request: Request) -> int | None:
        """See `Selector.longest_unscored`."""
        return self._drawn.get(request.seq_id)

    def _scored_survivals(self, draft: ScoredDraft) -> list[float]:
        return self._acceptance[scored(str(draft.request.drafter))].scored_survivals(draft, ROW_SHARE)

    def _most(self, request: Request) -> int:
        method = str(request.drafter)
        return most_nodes(request, self._longest, self._trees(method), self._look_ahead_rows(method))

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""
        plan, late, forced = self._plan, False, [outcome for outcome in outcomes if outcome.forced]
        asked = [self._asked(outcome) for outcome in outcomes if not outcome.forced]
        drafted = [outcome for outcome in asked if outcome.drafted]
        seen = self._note_silence(asked, forced)
        for outcome in asked:
            request, tests = outcome.request, outcome.accepted[: sum(outcome.tested)]
            draft, method = self._scores.get(request.seq_id), str(request.drafter)
            if outcome.drafted and draft is None:
                late = self._backlogs.note(request) > LEAST + sum(tests) or late
            if outcome.drafted or method in plan.planned:
                key = method if draft is None else scored(method)
                self._acceptance[key].observe(outcome, draft)
        seen |= {str(outcome.request.drafter) for outcome in drafted if outcome.request.seq_id not in self._scores}
        self._experiments.lose(self._lost(drafted, forced, timing))
        self._end_experiments(seen)
        self._note_scores(drafted)
        for method in plan.asked:
            self._note_lookups(method, drafted, timing)
        if drafted:
            self._plain = 0
            if plan.pure:
                self._follow(asked, forced, timing, late)
        elif plan.pure and plan.lengths and not any(plan.lengths) and not forced:
            self._follow_plain(timing)

    def _asked(self, outcome: DraftOutcome) -> DraftOutcome:
        """Return an outcome without the missing nodes that say nothing about its drafter.

        A model draws up to the length that this policy selected for it, look-ahead rows give as many as there are, and
        a tree may have fewer nodes at the same depth.
        """
        if not outcome.missing:
            return outcome
        method, came = str(outcome.request.drafter), sum(outcome.drafted)
        most = self._drawn.get(outcome.request.seq_id, came + outcome.missing)
        fewer = self._look_ahead_rows(method) or (came and self._trees(method))
        return outcome._replace(missing=0 if fewer else max(0, most - came))

    def _note_silence(self, asked: Sequence[DraftOutcome], forced: Sequence[DraftOutcome]) -> set[str]:
        """Count calls that returned no draft; return their methods."""
        plan, silent = self._plan, set[str]()
        came = {str(each.request.drafter) for each in asked if each.drafted or each.look_ahead_rows}
        came |= {str(draft.request.drafter) for draft in self._scores.values()}
        spared = {str(each.request.drafter) for each in forced} - {str(each.request.drafter) for each in asked}
        for method in {*plan.planned, *plan.asked}:
            if method in came:
                self._silent[method] = 0
            elif method not in spared and (method in plan.planned or self._silent[method] >= PATIENCE):
                self._silent[method] += 1
                silent.add(method)
        return silent

    def _lost(self, drafted: Sequence[DraftOutcome], forced: Sequence[DraftOutcome], timing: StepTiming) -> float:
        """Return the time, in plain steps, that a step took longer than its tokens usually do."""
        gained = 1 + sum(sum(outcome.accepted) for outcome in drafted) / max(1, len(self._plan.lengths))
        step_s, rows = timing.draft_s + timing.verify_s + timing.rest_s, num_drafted(forced)
        return step_s / self._plan.steps_s(self._costs, rows)[rows] * (1 + self._plan.gain) - gained

    def _end_experiments(self, seen: Collection[str]) -> None:
        """End those of this step. seen: the methods that drafted without scores, or returned nothing."""
        for method in seen:
            if self._experiments.end("draft", method):
                self._plan.left = 0

    def _note_scores(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Remember which methods' drafts have scores."""
        drafted = {str(outcome.request.drafter) for outcome in outcomes}
        having = {str(draft.request.drafter) for draft in self._scores.values()}
        if having - self._scored or (drafted & self._scored) - having:
            self._scored = (self._scored - drafted) | having
            self._plan.left = 0

    def _note_lookups(self, method: str, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Update the gain and the time of a call to a method with scores."""
        own = [outcome for outcome in outcomes if outcome.request.drafter == method]
        found = [outcome for outcome in own if outcome.request.seq_id in self._scores]
        lookups = self._lookups[method]
        accepted, nodes = sum(sum(each.accepted) for each in found), sum(sum(each.drafted) for each in found)
        steps_s = self._plan.steps_s(self._costs, nodes)
        lost = (steps_s[nodes] / steps_s[0] - 1) * len(self._plan.lengths)
        lookups.gain += LOOKUP_MEMORY * (accepted - lost - lookups.gain)
        if len(found) == len(own):  # else a model drafted as well
            lookups.seconds.add(timing.draft_s / max(1, sum(map(bool, self._plan.lengths))))
        silent = self._silent[method] - PATIENCE
        self._experiments.end("look up", method, least=0 if silent < 0 else min(2**silent, RESTS))

    def _follow(
        self, asked: Sequence[DraftOutcome], forced: Sequence[DraftOutcome], timing: StepTiming, late: bool
    ) -> None:
        """Follow the costs of a step with drafts. late: a drafter processed a backlog."""
        nodes = num_drafted([*asked, *forced])
        plan = self._plan
        self._costs.observe_step(
            self._experiments.step, plan.rows + nodes, len(plan.lengths), timing, plan.attention.seconds(nodes)
        )
        methods = {str(outcome.request.drafter) for outcome in asked}
        if len(methods) == 1 and not (late or forced or (self._scores and self._drawn)):
            depth = max(len(outcome.drafted) + outcome.missing for outcome in asked)
            self._costs.observe_draft(methods.pop(), len(asked), depth, timing.draft_s)

    def _follow_plain(self, timing: StepTiming) -> None:
        """Follow the costs of a step without drafts."""
        plan, tries = self._plan, self._experiments.runs("plain")
        self._plain += 1
        if self._plain > (PLAIN_STEPS // 2 if tries else PLAIN_STEPS):
            self._costs.observe_plain(self._experiments.step, plan.rows, len(plan.lengths), timing, plan.attention)


def num_drafted(outcomes: Sequence[DraftOutcome]) -> int:
    """Return the rows of drafts in the target's pass."""
    return sum(sum(outcome.drafted) + outcome.look_ahead_rows for outcome in outcomes)


SCORED = ", scored"


def scored(method: str) -> str:
    """Return the key for estimates of a method's drafts with scores; its name is the key for drafts without."""
    return method + SCORED


def build(context: DraftLengthContext) -> Adaptive:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", suggest(key, ["policy"]))
    own = context.trees, context.look_ahead_rows, context.selects
    return Adaptive(context.longest, context.costs(), *own)
