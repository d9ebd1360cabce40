"""The lengths with the most expected tokens per second, from what was accepted and what steps cost on this machine.

Estimates of acceptance (acceptance.py) and curves of costs (scheduling/costs.py) give the expected tokens per second of
every number of draft nodes, 0 included, for the whole batch at once (joint.py). A choice holds for some steps, so that
it costs little even where a step takes half a millisecond; a draft of which nothing is accepted shortens that time.
Where drafting does not pay, it is tried again now and then, less often after each failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from speculant.errors import ConfigError, suggest
from speculant.metrics import StepTiming
from speculant.scheduling.costs import CostCurve, StepCosts
from speculant.scheduling.draft_length.acceptance import HIGHEST, Acceptance
from speculant.scheduling.draft_length.base import DraftLengthContext, DraftOutcome, ScoredDraft
from speculant.scheduling.draft_length.joint import Offer, chain_offers, choose_jointly
from speculant.scheduling.scheduler import Schedule
from speculant.tree import depths_of
from speculant.types import Request

LONGEST = 16  # nodes of a draft unless the user sets a number
LEAST_GAIN = 0.01  # drafts that gain less are not worth the risk that the estimates are wrong
PROBE = 2  # nodes of a trial
HOLDS = 8  # steps for which a choice holds, for the same sequences
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # steps without drafts between two trials
UNKNOWN_COSTS = {1: 1.0, 64: 1.5}  # of a pass, in any unit, if nothing was measured


@dataclass
class _Trials:
    """When a method that does not pay is tried again."""

    wait: int = FIRST_WAIT
    since: int = 0
    probing: bool = False

    def due(self, steps: int = 1) -> bool:
        """Count steps without drafts and return whether a trial is due."""
        self.since += steps
        return self.since >= self.wait

    def start(self) -> None:
        self.since, self.probing = 0, True

    def end(self, accepted: bool) -> None:
        """Wait longer after a failure; try again at once after a success."""
        self.wait = 1 if accepted else min(LONGEST_WAIT, 2 * max(self.wait, FIRST_WAIT // 2))
        self.probing = False


@dataclass
class _Choice:
    """Lengths, and for how many more steps they hold.

    made_for: the rows without drafts, and the sequences with their longest drafts.
    """

    made_for: object
    lengths: list[int]
    left: int


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
        self._choices: dict[str, _Choice] = {}
        self._scored: set[str] = set()  # methods of which a draft had scores
        self._unscored: WeakSet[Request] = WeakSet()  # requests whose last draft had none all the same

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        rows, pure, lengths = 0, True, [0] * len(schedule.items)
        by_method: dict[str, list[int]] = {}
        for place, item in enumerate(schedule.items):
            rows += item.num_rows
            method, decodes, searches = item.request.drafter, item.decodes, item.request.search is not None
            pure = pure and decodes and not searches
            if searches:
                lengths[place] = self._most(item.request)
            elif decodes and method is not None:
                by_method.setdefault(method, []).append(place)
        self._planned = _Planned(rows, pure)
        for method, places in by_method.items():
            chosen = self._lengths(method, [schedule.items[place].request for place in places], rows)
            for place, length in zip(places, chosen, strict=True):
                lengths[place] = length
        return lengths

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """See `TrimmingLength.trim`."""
        for draft in drafts:
            self._scored.add(str(draft.request.drafter))
            self._planned.scores[draft.request] = draft
        offers = [
            Offer(gain, 1, depth, owner)
            for owner, draft in enumerate(drafts)
            for gain, depth in zip(self._scored_survivals(draft), depths_of(draft.parents), strict=True)
        ]
        counts = choose_jointly(offers, len(drafts), len(drafts), lambda nodes, depth, sequences: self._pass_s(nodes))
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
                self._choices.pop(method, None)
            elif not any(tests) and method in self._choices:
                self._choices[method].left //= 2
        if self._planned.pure:
            self._follow(outcomes, timing)

    def _most(self, request: Request) -> int:
        asked = request.num_speculative_tokens if request.num_speculative_tokens is not None else self._longest
        tree = self._trees(str(request.drafter))
        return asked if asked is not None else tree[0] if tree else LONGEST

    def _lengths(self, method: str, requests: Sequence[Request], rows: int) -> list[int]:
        """Choose the lengths of one method's sequences. Those whose drafts have scores are cut by them later."""
        most = [self._most(request) for request in requests]
        if method not in self._scored:
            return self._held_lengths(method, requests, most, rows)
        unscored = [place for place, request in enumerate(requests) if request in self._unscored]
        if unscored:
            own = [requests[place] for place in unscored], [most[place] for place in unscored]
            for place, length in zip(unscored, self._held_lengths(method, *own, rows), strict=True):
                most[place] = length
        return most

    def _held_lengths(self, method: str, requests: Sequence[Request], most: Sequence[int], rows: int) -> list[int]:
        """Return the last choice for drafts without scores, or a new one if it no longer holds."""
        made_for = rows, [(request.seq_id, longest) for request, longest in zip(requests, most, strict=True)]
        held = self._choices.get(method)
        if held is None or not held.left or held.made_for != made_for:
            held = self._choices[method] = _Choice(made_for, *self._joint_lengths(method, requests, most))
        held.left -= 1
        return held.lengths

    def _joint_lengths(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> tuple[list[int], int]:
        """Choose the lengths of drafts without scores, and for how many steps they hold."""

        def seconds(nodes: int, depth: int, sequences: int) -> float:
            return self._pass_s(nodes) + self._costs.draft_s(method, sequences, depth)

        trials, count = self._trials.setdefault(method, _Trials()), len(requests)
        counts = choose_jointly(self._offers(method, requests, most), count, count, seconds, LEAST_GAIN)
        steps = HOLDS
        if any(counts):
            trials.wait = FIRST_WAIT
        elif trials.due(0):
            trials.start()
            hopes = [[HIGHEST ** (1 + place) for place in range(longest)] for longest in most]
            if any(choose_jointly(chain_offers(hopes), count, count, seconds, LEAST_GAIN)):
                return [min(PROBE, longest) for longest in most], 1
        else:
            steps = min(HOLDS, trials.wait - trials.since)
            trials.due(steps)
        for request, length in zip(requests, counts, strict=True):
            if not length:
                self._acceptance[method].forget(request, steps)
        return counts, steps

    def _offers(self, method: str, requests: Sequence[Request], most: Sequence[int]) -> list[Offer]:
        acceptance, tree = self._acceptance[method], self._trees(method)
        if tree is None or min(most) < tree[0]:
            chains = [acceptance.survivals(request, longest) for request, longest in zip(requests, most, strict=True)]
            return chain_offers(chains)
        nodes, depth = tree
        gains = [sum(acceptance.survivals(request, depth)) for request in requests]
        return [Offer(gain, nodes, depth, owner) for owner, gain in enumerate(gains)]

    def _scored_survivals(self, draft: ScoredDraft) -> list[float]:
        return self._acceptance[str(draft.request.drafter)].scored_survivals(draft)

    def _pass_s(self, nodes: int) -> float:
        """Return the seconds of a step with so many nodes, without the time to draft them."""
        return self._costs.rest_s + self._costs.passes.at(self._planned.rows + nodes)

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
