"""A `Chance` that follows every branch, so that the exact distribution of a random result is summed.

`enumerate_case` runs every branch of a request's first speculative steps through the real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from speculant.config import Limits
from speculant.lab.exactness.tables import (
    History,
    Joint,
    NextProbs,
    Pair,
    Table,
    completed,
    conditioned,
    deviation,
    joint_distribution,
)
from speculant.metrics import RequestMetrics, TimingMetrics
from speculant.params import SamplingParams
from speculant.sampling import Chance, Chances, Node, distribution
from speculant.types import NO_WORK, Request, StepOutput

Outcome = TypeVar("Outcome", bound=Hashable)


class TooManyWaysError(Exception):
    """The enumeration has more branches than allowed."""


@dataclass
class Branches:
    """One path through a tree of random decisions: first those of the script, then always the first option.

    `probability` is that of the path. Options of probability 0 are skipped.
    """

    script: tuple[int, ...] = ()
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    untaken: list[tuple[int, ...]] = field(default_factory=list)

    def decide(self, weights: Sequence[float]) -> int:
        """Return the index of an option, chosen with probability proportional to its weight."""
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = options[0]
            self.untaken += [(*self.taken, other) for other in options[1:]]
        self.taken.append(choice)
        self.probability *= weights[choice] / sum(weights)
        return choice


class EnumeratingChance(Chance):
    """A `Chance` whose decisions come from `Branches`."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    @override
    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1, f"{probability} is not a probability"
        return self._branches.decide([1 - probability, probability]) == 1

    @override
    def draw(self, weights: Tensor) -> int:
        values = [float(weight) for weight in weights.tolist()]
        assert all(value >= 0 for value in values), f"{values} are not weights"
        assert sum(values) > 0, "nothing to draw from"
        return self._branches.decide(values)


class EnumeratingChances(Chances):
    """A `Chances` whose decisions come from the branches set for the request's id."""

    def __init__(self) -> None:
        self.branches: dict[str, Branches] = {}

    @override
    def draft(self, request: Request) -> EnumeratingChance:
        return EnumeratingChance(self.branches[request.request_id])

    @override
    def verify(self, request: Request) -> EnumeratingChance:
        return EnumeratingChance(self.branches[request.request_id])


def enumerate_outcomes(run: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Run once per branch; return each outcome's probability."""
    return enumerate_side_by_side(lambda ways: [run(branches) for branches in ways], width=1)


def enumerate_side_by_side(
    run: Callable[[list[Branches]], list[Outcome]], width: int, most: int | None = None
) -> dict[Outcome, float]:
    """Like `enumerate_outcomes`, for a `run` that follows up to `width` branches at a time.

    Raises TooManyWaysError as soon as there are more than `most`; None = any number.
    """
    outcomes: dict[Outcome, float] = {}
    pending: list[tuple[int, ...]] = [()]
    followed = 0
    while pending:
        ways = [Branches(script) for script in pending[-width:]]
        del pending[-width:]
        for outcome, branches in zip(run(ways), ways, strict=True):
            outcomes[outcome] = outcomes.get(outcome, 0.0) + branches.probability
            pending += branches.untaken
        followed += len(ways)
        if most is not None and followed + len(pending) > most:
            raise TooManyWaysError
    return outcomes


Result = tuple[tuple[int, ...], int]  # output, accepted draft tokens
ENDLESS = SamplingParams(max_tokens=None)
ROOM = 24  # tokens after the prompt that fit; more than any enumeration reaches


@dataclass(frozen=True)
class Case:
    """A request whose first speculative steps are enumerated.

    length: draft nodes. steps: verifications with a draft. idle: the most verifications without one; None = the number
    that a long prompt may need. width: branches followed in one batch. budget: the most rows of a step. The caches must
    not keep prefixes, or one branch would change the steps of the next. source: what an encoder-decoder model reads,
    whose decoder has the prompt; () = the model is a decoder alone.
    """

    pair: Pair
    length: int
    params: SamplingParams = ENDLESS
    verification: str = "rejection"
    prompt: History = (0,)
    ends: frozenset[int] = frozenset()
    steps: int = 1
    width: int = 1
    budget: int = 1024
    idle: int | None = None
    source: History = ()

    @property
    def limits(self) -> Limits:
        """The sizes of the engine that runs it."""
        return Limits(len(self.prompt) + ROOM, self.width, self.budget)

    @property
    def rounds(self) -> int:
        """The most verifications; after a prompt of several tokens the first ones may have no draft."""
        needed = 0 if len(self.prompt) == 1 else len(self.prompt) + 1
        return self.steps + (needed if self.idle is None else self.idle)

    @property
    def distribution(self) -> NextProbs:
        """The target's own distribution, one token at a time."""
        return self.distribution_of(conditioned(self.pair.target, self.source) if self.source else self.pair.target)

    def distribution_of(self, table: Table) -> NextProbs:
        """Return the distribution of a table's logits under this request's settings."""
        known: dict[History, list[float]] = {}

        def distribution(history: History) -> list[float]:
            if history not in known:
                known[history] = self.transformed(table(history), history)
            return known[history]

        return distribution

    def transformed(self, logits: Sequence[float], history: History) -> list[float]:
        """Return the distribution of one context's logits under this request's settings."""
        request = Request(
            seq_id=0,
            request_id="",
            index=0,
            prompt=self.prompt,
            params=self.params,
            seed=0,
            end_token_ids=self.ends,
            metrics=RequestMetrics(TimingMetrics(arrival=0.0)),
            tokens=list(history),
        )
        probs = distribution(torch.tensor([logits], dtype=torch.float64), [Node(request)])[0]
        return [float(each) for each in probs.tolist()]

    def is_over(self, output: History) -> bool:
        """Whether an output ends its request."""
        return len(output) >= self.params.min_tokens and output[-1] in self.ends


@dataclass(frozen=True)
class Enumerated:
    """Every outcome of a case with its probability."""

    case: Case
    results: Mapping[Result, float] = field(repr=False)

    @property
    def tokens(self) -> Joint:
        """The distribution of the output."""
        joint: Joint = {}
        for (output, _), probability in self.results.items():
            joint[output] = joint.get(output, 0.0) + probability
        return joint

    @property
    def mean_accepted(self) -> float:
        """The expected number of accepted draft tokens."""
        return sum(accepted * probability for (_, accepted), probability in self.results.items())

    def deviation(self) -> float:
        """Return the largest difference of the joint distribution, completed by the target, from the target's own."""
        case, outcomes = self.case, self.tokens
        distribution, depth = case.distribution, max(len(output) for output in outcomes)
        ours = completed(outcomes, distribution, case.prompt, depth, case.is_over)
        return deviation(ours, joint_distribution(distribution, case.prompt, depth, case.is_over))


class Stepping(Protocol):
    """Runs a case: an `Engine`, or a wrapper that also observes it."""

    def add_request(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, *, source: Sequence[int] = ()
    ) -> list[Request]:
        """See `Engine.add_request`."""
        ...

    def step(self) -> list[StepOutput]:
        """See `Engine.step`."""
        ...

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        ...


def enumerate_case(case: Case, build: Callable[[EnumeratingChances], Stepping], most: int | None = None) -> Enumerated:
    """Follow every branch of a case through one engine, which serves all of them.

    Raises TooManyWaysError if there are more than `most`.
    """
    chances = EnumeratingChances()
    engine = build(chances)
    results = enumerate_side_by_side(lambda ways: _run(case, engine, chances, ways), case.width, most)
    assert abs(sum(results.values()) - 1) < 1e-12, "branches were lost"
    return Enumerated(case, results)


def _run(case: Case, engine: Stepping, chances: EnumeratingChances, ways: list[Branches]) -> list[Result]:
    chances.branches = {str(index): branches for index, branches in enumerate(ways)}
    requests = list[Request]()
    for name in chances.branches:
        requests += engine.add_request(case.prompt, case.params, name, source=case.source)
    for request in requests:
        request.work = NO_WORK  # each way through the engine has the same steps, however busy the machine is
    running = list(requests)
    while running:
        engine.step()
        for request in [request for request in running if _is_done(request, case)]:
            running.remove(request)
            engine.abort(request.request_id)
    return [_result(request) for request in requests]


def _is_done(request: Request, case: Case) -> bool:
    if request.error is not None:
        raise request.error
    speculated = request.metrics.speculative_decoding.num_spec_steps
    return request.finished or speculated >= case.steps or request.rounds >= case.rounds


def _result(request: Request) -> Result:
    return tuple(request.output), request.metrics.speculative_decoding.num_accepted_draft_tokens
