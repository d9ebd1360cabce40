"""The lengths with the most expected tokens per second, from what was accepted and what steps cost on this machine.

Estimates of acceptance (acceptance.py) and curves of costs (scheduling/costs.py) give the expected tokens per second of
every number of draft nodes, 0 included, for the whole batch at once (joint.py). Where drafting does not pay, it is
tried again now and then, less often after each failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from speculant.errors import ConfigError, suggest
from speculant.metrics import StepTiming
from speculant.scheduling.costs import CostCurve, Floats, Integers, StepCosts
from speculant.scheduling.draft_length.acceptance import HIGHEST, Acceptance
from speculant.scheduling.draft_length.base import DraftLengthContext, DraftOutcome, ScoredDraft
from speculant.scheduling.draft_length.joint import Offers, choose_jointly
from speculant.scheduling.scheduler import Schedule, Scheduled
from speculant.tree import depths_of
from speculant.types import Request

LONGEST = 16  # nodes of a draft unless the user sets a number
LEAST_GAIN = 0.01  # drafts that gain less are not worth the risk that the estimates are wrong
PROBE = 2  # nodes of a trial
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # steps without drafts between two trials
UNKNOWN_COSTS = {1: 1.0, 64: 1.5}  # of a pass, in any unit, if nothing was measured


@dataclass
class _Trials:
    """When a method that does not pay is tried again."""

    wait: int = FIRST_WAIT
    since: int = 0
    probing: bool = False

    def due(self) -> bool:
        """Count a step without drafts and return whether a trial is due."""
        self.since += 1
        return self.since >= self.wait

    def start(self) -> None:
        self.since, self.probing = 0, True

    def end(self, accepted: bool) -> None:
        """Wait longer after a failure; try again at once after a success."""
        self.wait = 1 if accepted else min(LONGEST_WAIT, 2 * max(self.wait, FIRST_WAIT // 2))
        self.probing = False


@dataclass
class _Planned:
    """What the last choice was made from: the rows without drafts, and whether all items only decode."""

    rows: int = 0
    pure: bool = False
    scores: WeakKeyDictionary[Request, ScoredDraft] = field(default_factory=WeakKeyDictionary)


class Adaptive:
    """See the module's docstring. longest: the most nodes of a draft; None = LONGEST, or a whole tree.

    costs: None = nothing was measured. trees: nodes and depth of the trees of methods that draft whole trees.
    """

    keeps_up = False

    def __init__(
        self,
        longest: int | None = None,
        costs: StepCosts | None = None,
        trees: Callable[[str], tuple[int, int] | None] = lambda method: None,
    ) -> None:
        self._longest, self._trees = longest, trees
        self._costs = costs or StepCosts(CostCurve(UNKNOWN_COSTS))
        self._acceptance, self._planned = Acceptance(), _Planned()
        self._trials: dict[str, _Trials] = {}
        self._scored: set[str] = set()  # methods of which a draft had scores
        self._unscored: WeakSet[Request] = WeakSet()  # requests whose last draft had none all the same

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        rows = sum(item.num_rows for item in schedule.items)
        pure = all(item.decodes and item.request.search is None for item in schedule.items)
        self._planned = _Planned(rows, pure)
        lengths = {item.request.seq_id: 0 for item in schedule.items}
        by_method: dict[str, list[Scheduled]] = {}
        for item in schedule.items:
            if item.request.search is not None:
                lengths[item.request.seq_id] = self._most(item.request)
            elif item.decodes and item.request.drafter is not None and self._most(item.request):
                by_method.setdefault(item.request.drafter, []).append(item)
        for method, items in by_method.items():
            chosen = self._lengths(method, items, rows)
            lengths.update(zip((item.request.seq_id for item in items), chosen, strict=True))
        return [lengths[item.request.seq_id] for item in schedule.items]

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """See `TrimmingLength.trim`."""
        for draft in drafts:
            self._scored.add(str(draft.request.drafter))
            self._planned.scores[draft.request] = draft
        gains = [self._acceptance[str(draft.request.drafter)].scored_survivals(draft) for draft in drafts]
        depths = [depths_of(draft.parents) for draft in drafts]
        owners = [[place] * len(own) for place, own in enumerate(gains)]
        joined = [np.array([value for own in lists for value in own]) for lists in (gains, depths, owners)]
        offers = Offers(joined[0], np.ones(len(joined[0]), dtype=np.int64), joined[1], joined[2], len(drafts))
        counts = choose_jointly(offers, len(drafts), lambda nodes, depths, sequences: self._pass_s(nodes))
        return [count or self._probed(draft) for count, draft in zip(counts, drafts, strict=True)]

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""
        for outcome in outcomes:
            method = str(outcome.request.drafter)
            tests = [bool(accepted) for accepted in outcome.accepted[: sum(outcome.tested)]]
            draft = self._planned.scores.get(outcome.request)
            (self._unscored.add if draft is None else self._unscored.discard)(outcome.request)
            self._acceptance[method].observe(outcome.request, tests, tested_scores(draft, outcome, len(tests)))
            trials = self._trials.get(method)
            if trials is not None and trials.probing:
                trials.end(any(tests))
        if self._planned.pure:
            self._follow(outcomes, timing)

    def _most(self, request: Request) -> int:
        asked = request.num_speculative_tokens if request.num_speculative_tokens is not None else self._longest
        tree = self._trees(str(request.drafter))
        return asked if asked is not None else tree[0] if tree else LONGEST

    def _lengths(self, method: str, items: Sequence[Scheduled], rows: int) -> list[int]:
        """Choose the lengths of one method's sequences."""
        most = [self._most(item.request) for item in items]
        if method not in self._scored:
            return self._joint_lengths(method, items, most, rows)
        unscored = [place for place, item in enumerate(items) if item.request in self._unscored]
        lengths = list(most)  # drafts with scores are cut by them
        if unscored:
            own = [items[place] for place in unscored], [most[place] for place in unscored]
            for place, length in zip(unscored, self._joint_lengths(method, *own, rows), strict=True):
                lengths[place] = length
        return lengths

    def _joint_lengths(self, method: str, items: Sequence[Scheduled], most: Sequence[int], rows: int) -> list[int]:
        """Choose the lengths of drafts without scores."""

        def seconds(nodes: Integers, depths: Integers, sequences: Integers) -> Floats:
            return self._pass_s(nodes) + self._costs.draft_s(method, sequences, depths)

        acceptance, requests = self._acceptance[method], [item.request for item in items]
        counts = choose_jointly(self._offers(method, requests, most), len(items), seconds, LEAST_GAIN)
        for item, count in zip(items, counts, strict=True):
            if not count:
                acceptance.forget(item.request)
        trials = self._trials.setdefault(method, _Trials())
        if any(counts):
            trials.wait = FIRST_WAIT
        elif trials.due():
            trials.start()
            hopes = np.full((len(most), max(most)), HIGHEST)
            if any(choose_jointly(Offers.chains(hopes, np.array(most)), len(items), seconds, LEAST_GAIN)):
                return [min(PROBE, longest) for longest in most]
        return counts

    def _offers(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> Offers:
        acceptance, tree = self._acceptance[method], self._trees(method)
        if tree is None or min(most) < tree[0]:
            return Offers.chains(acceptance.survivals(requests, max(most)), np.array(most))
        gains, ones = acceptance.survivals(requests, tree[1]).sum(axis=1), np.ones(len(requests), dtype=np.int64)
        return Offers(gains, tree[0] * ones, tree[1] * ones, np.arange(len(requests)), len(requests))

    def _pass_s(self, nodes: Integers) -> Floats:
        """Return the seconds of steps with so many nodes, without the time to draft them."""
        rows = self._planned.rows + nodes
        return self._costs.rest_s + self._costs.passes.up_to(int(rows[-1]))[rows]

    def _probed(self, draft: ScoredDraft) -> int:
        """Return how many nodes of a scored draft are tried although they do not seem to pay."""
        trials = self._trials.setdefault(str(draft.request.drafter), _Trials())
        if not trials.due():
            return 0
        trials.start()
        return min(PROBE, len(draft.scores))

    def _follow(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Let the curves follow a step in which every sequence decodes."""
        nodes = sum(sum(outcome.drafted) for outcome in outcomes)
        self._costs.passes.observe(self._planned.rows + nodes, timing.verify_s)
        self._costs.observe_rest(timing.rest_s)
        methods = {str(outcome.request.drafter) for outcome in outcomes}
        if len(methods) == 1:
            depth = max(len(outcome.drafted) for outcome in outcomes)
            self._costs.observe_draft(methods.pop(), len(outcomes), depth, timing.draft_s)


def tested_scores(draft: ScoredDraft | None, outcome: DraftOutcome, count: int) -> list[float | None]:
    """Return the scores of the first `count` tested nodes: the accepted ones, then the first sibling rejected there."""
    if draft is None:
        return [None] * count
    path = list(outcome.path)
    if len(path) < count:
        parent = path[-1] if path else -1
        path.append(next(node for node, each in enumerate(draft.parents) if each == parent))
    return [draft.scores[node] for node in path[:count]]


def build(context: DraftLengthContext) -> Adaptive:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", suggest(key, ["policy"]))
    return Adaptive(context.longest, context.costs(), context.trees)
