"""The lengths with the most expected tokens per second, from past acceptance and the costs of steps on this machine.

Estimates of acceptance (acceptance.py) and curves of costs (lengths/costs.py) give the expected tokens per second of
every number of draft nodes, 0 included, for the whole batch at once (joint.py). A choice holds for some steps, so that
it costs little even where a step takes half a millisecond; a draft of which nothing is accepted shortens that time.
Where drafting does not pay, it is tried again now and then, less often after each failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from weakref import WeakSet

from speculant.errors import ConfigError, suggest
from speculant.lengths.acceptance import Acceptance
from speculant.lengths.backlog import Backlogs
from speculant.lengths.base import DraftLengthContext, DraftOutcome, ScoredDraft, num_rows
from speculant.lengths.choice import Choice, asked_length, identity_of, most_nodes, no_drafts, scored
from speculant.lengths.costs import CostCurve, StepCosts
from speculant.lengths.joint import choose_jointly, choose_scored, offers_of
from speculant.lengths.plain_steps import BLOCK, PlainSteps
from speculant.lengths.trials import LEAST_GAIN, PROBE, Longer, Lookups, Trials
from speculant.metrics import StepTiming
from speculant.scheduling.scheduler import Schedule
from speculant.types import Request

# A draft makes its pass slower by a share (`StepCosts.undrafted`), and also the next passes without drafts.
RETURN = 0.2  # times this share is the gain that drafts need in addition
RECOVERY = 4  # times this share is the time that these next passes lose together
CHEAP = 0.25  # of a pass: a drafter whose first token takes longer is not tried if its costs exceed its gain
HOLDS = 8  # steps for which a choice holds, for the same sequences
LONGEST_HOLD, LONGEST_PAUSE = 32, 64  # if it is the same as before; if nothing is drafted
FOLLOWED = 4  # one in this many steps with drafts is timed
LATE = 8  # backlog in tokens from which the time of a draft is not a usual one
UNKNOWN_COSTS = {1: 1.0, 64: 1.5}  # of a pass, in any unit, if nothing was measured


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
        self._backlogs = Backlogs(self._costs)
        self._acceptance = Acceptance()
        self._trials: dict[str, Trials] = {}
        self._longer: dict[str, Longer] = {}
        self._held = Choice([], [], 0, self._costs.passes.at(0), False, 0)
        self._holds = HOLDS  # of a choice
        self._plain_steps = PlainSteps(self._costs)
        self._own_s = 0.0  # seconds of `observe` after a step with drafts
        self._scores: dict[int, ScoredDraft] = {}  # of this step, by sequence id
        self._scored: dict[str, Lookups] = {}  # methods with a draft that had scores
        self._unscored: WeakSet[Request] = WeakSet()  # requests of these methods whose last draft had no scores
        self._selecting: set[str] = set()  # methods for which this policy selects between candidate drafters
        self._unscored_lengths: dict[int, int] = {}  # of their drafts without scores, by sequence id

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        made_for = identity_of(schedule)
        if not self._held.left or self._held.made_for != made_for:
            before, self._held = self._held, self._choose(schedule)
            same = self._held.left == HOLDS and (before.made_for, before.lengths) == (made_for, self._held.lengths)
            self._holds = min(2 * self._holds, LONGEST_HOLD) if same else HOLDS
            self._held.left = max(self._held.left, self._holds) if same else self._held.left
        self._held.left -= 1
        self._scores.clear()
        return self._held.lengths

    def pause(self) -> int:
        """See `PausingLength.pause`: it lasts until the next step that is timed."""
        return self._plain_steps.pause(self._held)

    def _choose(self, schedule: Schedule) -> Choice:
        by_method: dict[str, list[int]] = {}
        self._unscored_lengths = {}
        self._plain_steps.end(self._held)
        held = self._held = no_drafts(schedule, self._costs, HOLDS)
        for place, item in enumerate(schedule.items):
            request, method = item.request, item.request.drafter
            held.pure = held.pure and item.decodes and request.search is None
            if (asked := asked_length(request)) is not None or request.search is not None:
                held.lengths[place] = self._most(request) if asked is None else asked
            elif item.decodes and method is not None:
                by_method.setdefault(method, []).append(place)
        drawing = by_method.keys() - (self._scored.keys() - self._selecting)  # passes differ only after such drafts
        if held.pure and drawing and self._plain_steps.due():
            held.left = BLOCK
            return held
        steps = list[int]()
        for method, places in by_method.items():
            lengths, holds = self._lengths(method, [schedule.items[place].request for place in places])
            steps.append(holds)
            for place, length in zip(places, lengths, strict=True):
                held.lengths[place] = length
        held.left = min(steps, default=HOLDS)
        return held

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """See `TrimmingLength.trim`."""
        for draft in drafts:
            self._scored.setdefault(str(draft.request.drafter), Lookups())
            self._scores[draft.request.seq_id] = draft
        survivals = [self._scored_survivals(draft) for draft in drafts]
        pass_s = self._held.steps_s(self._costs, sum(map(len, survivals)))
        counts = choose_scored(survivals, [each.parents for each in drafts], pass_s)
        for place, draft in enumerate(drafts):
            if asked_length(draft.request) is not None:
                counts[place] = len(draft.scores)
            elif self._scored[str(draft.request.drafter)].keep(counts[place]):
                self._held.left = 0
            trials = self._trials.setdefault(scored(str(draft.request.drafter)), Trials())
            counts[place] = counts[place] or trials.probe(len(draft.scores))
        return counts

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """See `Selector.prefers`: the draft with the more expected tokens per second is taken."""
        method, tokens = str(request.drafter), len(self._held.lengths)
        self._begin_selecting(method)
        if asked_length(request) is not None:
            return True
        length = self._unscored_lengths.get(request.seq_id, 0)
        gain = sum(self._acceptance[method].survivals(request, length))
        pass_s = self._held.steps_s(self._costs, max(length, len(scores)))
        other = (tokens + gain) / (pass_s[length] + self._costs.draft_s(method, 1, length))
        expected = accumulate(self._scored_survivals(ScoredDraft(request, scores, parents)), initial=float(tokens))
        return any(each >= other * pass_s[nodes] for nodes, each in enumerate(expected) if nodes)

    def _begin_selecting(self, method: str) -> None:
        """Note that this policy selects between a method's candidate drafters."""
        if method not in self._selecting:
            self._selecting.add(method)
            self._scored.setdefault(method, Lookups())
            self._unscored.clear()
            self._held.left = 0

    def longest_unscored(self, request: Request) -> int | None:
        """See `Selector.longest_unscored`."""
        return self._unscored_lengths.get(request.seq_id)

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""
        started, probed = time.perf_counter(), dict[str, bool]()
        held, missed, costly = self._held, bool(outcomes), False
        if not (outcomes or held.asked):
            self._plain_steps.observe(held, timing)
            return
        for outcome in outcomes:
            method = str(outcome.request.drafter)
            tests = outcome.accepted[: sum(outcome.tested)]
            draft = self._scores.get(outcome.request.seq_id)
            if draft is None:
                costly = self._backlogs.note(outcome.request) > LATE + sum(outcome.accepted) or costly
            self._note_scores(outcome.request, method, draft is not None)
            key = method if draft is None else scored(method)
            trials = self._trials.get(key)
            self._acceptance[key].observe(outcome, draft)
            if trials is not None and trials.probing:
                probed[key] = probed.get(key, True) and all(tests)
                costly = costly or trials.doubting
            missed = missed and not any(tests) and method not in self._scored
        for key, accepted in probed.items():
            self._trials[key].end(accepted)
        held.left = 0 if probed else held.left // 2 if missed else held.left
        for method in held.asked:
            own = [outcome for outcome in outcomes if outcome.request.drafter == method]
            self._scored[method].observe(sum(sum(outcome.accepted) for outcome in own), timing.draft_s)
        if not outcomes:
            self._plain_steps.observe(held, timing)
            return
        drafted = self._plain_steps.drafted()
        if held.pure:
            if drafted % FOLLOWED == 1 or not held.left:
                self._follow(outcomes, timing, costly)
            self._own_s = time.perf_counter() - started

    def _note_scores(self, request: Request, method: str, has_scores: bool) -> None:
        """Remember whether a draft of a method that gives scores had some."""
        if method in self._scored and method not in self._selecting and has_scores is (request in self._unscored):
            (self._unscored.discard if has_scores else self._unscored.add)(request)
            self._held.left = 0

    def _most(self, request: Request) -> int:
        method = str(request.drafter)
        return most_nodes(request, self._longest, self._trees(method), self._look_ahead_rows(method))

    def _lengths(self, method: str, requests: Sequence[Request]) -> tuple[list[int], int]:
        """Choose the lengths of one method's sequences, and for how many steps they hold.

        Sequences whose drafts have scores get the longest: their drafts are cut by the scores.
        """
        most = [self._most(request) for request in requests]
        if method in self._selecting or self._selects(method):
            self._begin_selecting(method)
            lengths, holds = self._joint_lengths(method, requests, most)
            self._unscored_lengths |= {request.seq_id: each for request, each in zip(requests, lengths, strict=True)}
            if any(lengths):
                reach = max(self._scored[method].reach, *lengths)
                return [min(each, reach) for each in most], holds
        if method not in self._scored:
            return self._joint_lengths(method, requests, most)
        lookups = self._scored[method]
        plain_s = self._costs.plain_rest_s + self._held.plain_s
        is_costly = lookups.gain * plain_s < len(requests) * lookups.seconds  # a token takes a share of its pass
        if is_costly and (steps := lookups.pause()):
            return [0] * len(requests), steps
        steps = 1 if is_costly else HOLDS
        self._held.asked.append(method)
        most = [min(each, lookups.reach) for each in most]
        unscored = [place for place, request in enumerate(requests) if request in self._unscored]
        if unscored:
            own = [requests[place] for place in unscored]
            lengths, holds = self._joint_lengths(method, own, [most[place] for place in unscored])
            steps = min(steps, holds)
            for place, length in zip(unscored, lengths, strict=True):
                most[place] = length
        return most, steps

    def _joint_lengths(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> tuple[list[int], int]:
        """Choose the lengths of drafts without scores, and for how many steps they hold."""
        draft_s = cache(partial(self._costs.draft_s, method))  # needed many times, while nothing changes
        own = self._look_ahead_rows(method)
        pass_s = self._held.steps_s(self._costs, num_rows(sum(most), own, len(most)))

        def seconds(nodes: int, depth: int, sequences: int) -> float:
            return pass_s[nodes + (nodes + sequences) * min(depth, own)] + draft_s(sequences, depth)

        trials, count, tree = self._trials.setdefault(method, Trials()), len(requests), self._trees(method)
        offers = offers_of(self._acceptance[method], requests, most, tree, LEAST_GAIN)
        least_gain = LEAST_GAIN + RETURN * (1 - self._costs.undrafted)
        chosen = choose_jointly(offers, count, count, seconds, least_gain)
        counts = self._backlogs.drop(method, requests, chosen, offers, seconds)
        steps = HOLDS
        if any(counts):
            trials.pays()
            if self._longer.setdefault(method, Longer()).due(steps, sum(counts)):
                return [min(2 * each, longest) for each, longest in zip(counts, most, strict=True)], 1 + bool(own)
        elif (
            (trials.due(0) or not trials.doubt)
            and any(tried := self._backlogs.affordable(method, requests, most, seconds(0, 0, 0)))
            and trials.may_pay(most, seconds, least_gain, draft_s(count, 1) < CHEAP * self._held.plain_s)
        ):
            probe = tree[0] if tree and min(most) >= tree[0] else PROBE  # acceptance by depth is of whole trees
            tried, returning = trials.start(tried, probe), RECOVERY * (1 / self._costs.undrafted - 1)
            trial_s = seconds(sum(tried), max(tried), sum(map(bool, tried)))
            trials.costs(trial_s / seconds(0, 0, 0) - 1 + returning)
            return tried, 1 + bool(own)  # look-ahead rows are computed a step before their draft
        else:
            steps = min(LONGEST_PAUSE, max(HOLDS, trials.wait - trials.since))
            trials.due(steps)
        for request, length in zip(requests, counts, strict=True):
            if not length:
                self._acceptance[method].forget(request, steps)
        return counts, steps

    def _scored_survivals(self, draft: ScoredDraft) -> list[float]:
        return self._acceptance[scored(str(draft.request.drafter))].scored_survivals(draft, LEAST_GAIN)

    def _follow(self, outcomes: Sequence[DraftOutcome], timing: StepTiming, costly: bool) -> None:
        """Update the curves by a step with drafts in which every sequence decodes.

        costly: the step is a trial of costs alone, or has a draft with a long backlog, so that it can only show that
        costs are lower.
        """
        nodes = sum(sum(outcome.drafted) + outcome.look_ahead_rows for outcome in outcomes)
        rows, attention_s = self._held.rows + nodes, self._held.attention.seconds(nodes)
        if costly and timing.verify_s > self._costs.passes.at(rows) + attention_s:
            return
        self._costs.observe_pass(rows, timing.verify_s, attention_s, bool(self._scores))
        self._costs.observe_rest(timing.rest_s + self._own_s)
        methods = {str(outcome.request.drafter) for outcome in outcomes}
        if len(methods) == 1 and not (self._scores and methods & self._selecting):
            method, depth = methods.pop(), max(len(outcome.drafted) for outcome in outcomes)
            if not costly or timing.draft_s < self._costs.draft_s(method, len(outcomes), depth):
                self._costs.observe_draft(method, len(outcomes), depth, timing.draft_s)


def build(context: DraftLengthContext) -> Adaptive:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", suggest(key, ["policy"]))
    own = context.trees, context.look_ahead_rows, context.selects
    return Adaptive(context.longest, context.costs(), *own)
