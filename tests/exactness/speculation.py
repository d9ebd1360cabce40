"""Runs requests through the real step, following every branch of its chance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from speculant.config import Limits
from speculant.drafting.base import Drafter
from speculant.params import SamplingParams
from speculant.sampling.chance import Chances
from speculant.types import Request
from tests.enumeration import Branches, EnumeratingChances, enumerate_side_by_side
from tests.exactness.laws import Joint, Pair, completed, deviation, joint_law, transformed
from tests.fakes import History, MakeCache, Rig, TableModel, build_rig, model_drafter, slotted

MakeDrafter = Callable[[Pair, Chances, Limits], Drafter]
Result = tuple[tuple[int, ...], int]  # output, accepted draft tokens
ENDLESS = SamplingParams(max_tokens=None)
ROOM = 24  # tokens behind the prompt that fit; more than any enumeration reaches


def draft_model(pair: Pair, chances: Chances, limits: Limits, cache: MakeCache = slotted) -> Drafter:
    """Make the real drafter for a pair's draft law."""
    return model_drafter(TableModel(pair.draft, pair.vocab_size), pair.vocab_size, chances, limits, cache)


@dataclass(frozen=True)
class Case:
    """A request whose first speculative steps are enumerated.

    length is the number of draft nodes, steps that of verifications with a draft, width the number of
    ways followed in one batch, budget the rows a step may have. The caches must not keep prefixes, or one way
    would change the steps of the next.
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
    make_drafter: MakeDrafter = draft_model
    cache: MakeCache = slotted

    @property
    def rounds(self) -> int:
        """The most verifications there may be; behind a longer prompt the first ones have no draft yet."""
        return self.steps if len(self.prompt) == 1 else self.steps + len(self.prompt) + 1

    @property
    def law(self) -> Callable[[History], list[float]]:
        """The target's own law, worked out independently."""
        return self.law_of(self.pair.target)

    def law_of(self, table: Callable[[History], list[float]]) -> Callable[[History], list[float]]:
        """Return the law of a table's logits under this request's settings."""
        known: dict[History, list[float]] = {}

        def law(history: History) -> list[float]:
            if history not in known:
                known[history] = transformed(table(history), self.params, history, len(self.prompt), self.ends)
            return known[history]

        return law

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
        """The law of the output."""
        joint: Joint = {}
        for (output, _), probability in self.results.items():
            joint[output] = joint.get(output, 0.0) + probability
        return joint

    @property
    def mean_accepted(self) -> float:
        """The expected number of accepted draft tokens."""
        return sum(accepted * probability for (_, accepted), probability in self.results.items())

    def deviation(self) -> float:
        """Return how far the joint law, completed by the target, is from the target's own."""
        case, outcomes = self.case, self.tokens
        depth = max(len(output) for output in outcomes)
        ours = completed(outcomes, case.law, case.prompt, depth, case.is_over)
        return deviation(ours, joint_law(case.law, case.prompt, depth, case.is_over))


def enumerate_case(case: Case) -> Enumerated:
    """Follow every branch of a case through one engine, whose rows are used again and again."""
    chances = EnumeratingChances()
    limits = Limits(len(case.prompt) + ROOM, case.width, case.budget)
    drafter = case.make_drafter(case.pair, chances, limits)
    target = TableModel(case.pair.target, case.pair.vocab_size)
    rig = build_rig(
        target,
        drafter,
        length=case.length,
        verification=case.verification,
        chances=chances,
        limits=limits,
        ends=case.ends,
        cache=case.cache,
    )
    results = enumerate_side_by_side(lambda ways: _run(case, rig, chances, ways), case.width)
    assert abs(sum(results.values()) - 1) < 1e-12, "branches were lost"
    return Enumerated(case, results)


def _run(case: Case, rig: Rig, chances: EnumeratingChances, ways: list[Branches]) -> list[Result]:
    chances.branches = {str(index): branches for index, branches in enumerate(ways)}
    requests = [request for name in chances.branches for request in rig.add(case.prompt, case.params, name)]
    running = list(requests)
    while running:
        rig.step()
        for request in [request for request in running if _is_done(request, case)]:
            running.remove(request)
            rig.abort(request.request_id)
    return [_result(request) for request in requests]


def _is_done(request: Request, case: Case) -> bool:
    speculated = request.metrics.speculative_decoding.num_spec_steps
    return request.finished or speculated >= case.steps or request.rounds >= case.rounds


def _result(request: Request) -> Result:
    return tuple(request.output), request.metrics.speculative_decoding.num_accepted_draft_tokens
