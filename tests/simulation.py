"""A simulated engine for draft-length policies: acceptance and costs are given, and their sum is the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speculant.lengths import DraftLength, DraftOutcome, ScoredDraft
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.scheduling import Schedule, Scheduled
from speculant.types import Request
from tests.models import make_request

LONG = SamplingParams(temperature=0, max_tokens=None)


@dataclass
class World:
    """The properties of a simulated engine, which a policy does not see.

    pass_s: seconds of a pass by its rows. token_s: seconds per drafted token of a chain, however many sequences.
    alpha: the probability that a token is accepted, by the length of its sequence. score: the drafter's score of a
    token; None = it gives none. first_scored: the number of first steps that have scores. returned: how many nodes the
    drafter returns, by the length of the sequence and the nodes that it is asked for. only: the one sequence whose
    drafts are accepted; None = all. forced: tokens that a constraint forces, by step and sequence; its drafter is not
    asked. ask_s: seconds of each call. undrafted: the relative time
    of a pass that follows another one without a draft between them. lingers: the share of that difference that is left
    after one more such pass. bursts: the share of passes that other programs make up to five times as long; the policy
    sees the added time, the result does not count it. look_ahead_rows: the drafter's most below each node, from which
    the next pass's draft comes; 0 = none. prompt: its number of tokens. key_s: seconds that each of them adds to a
    pass, by the pass's rows.
    """

    pass_s: Callable[[int], float]
    token_s: float
    alpha: Callable[[int], float]
    score: Callable[[float], float] | None = None
    noise: float = 0.0
    first_scored: int | None = None
    returned: Callable[[int, int], int] = lambda place, asked: asked
    only: int | None = None
    forced: Callable[[int, int], int] = lambda step, index: 0
    ask_s: float = 0.0
    undrafted: float = 1.0
    lingers: float = 0.0
    bursts: float = 0.0
    look_ahead_rows: int = 0
    prompt: int = 1
    key_s: Callable[[int], float] = lambda rows: 0.0
    seed: int = 0
    time: float = 0.0
    tokens: int = 0
    asks: list[int] = field(default_factory=list)  # the steps that called the drafter
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, policy: DraftLength, batch: int, steps: int) -> float:
        """Return tokens per second over some steps of a batch."""
        requests = [
            make_request([1] * self.prompt, [], LONG, seq_id=1 + index, method="some") for index in range(batch)
        ]
        lengths, missing, known, pause = [0] * batch, 1.0, [0] * batch, 0
        for step in range(steps):
            if step == self.first_scored:
                self.score = None
            items = [Scheduled(request, len(request.tokens) - 1, 1) for request in requests]
            schedule = Schedule(items, None, 10**6, [], [])  # type: ignore[arg-type]
            paused, pause = pause > 0, max(0, pause - 1)
            forced = [self.forced(step, index) for index in range(batch)]
            asked = [0] * batch if paused else [*policy.choose(schedule)]
            asked = [0 if own else count for own, count in zip(forced, asked, strict=True)]
            if not (paused or any(asked)):
                pause = policy.pause()
            self.asks += [step] if any(asked) else []
            chosen = [self.returned(place, count) for place, count in zip(lengths, asked, strict=True)]
            alphas = [[self._alpha(i, lengths[i] + k) for k in range(n)] for i, n in enumerate(chosen)]
            drafted_s = self.token_s * max(asked) + self.ask_s * any(asked)
            ahead = [min(count, self.look_ahead_rows) for count in chosen]
            if self.look_ahead_rows:
                alphas = [each[:states] for each, states in zip(alphas, known, strict=True)]
            missing_nodes = [count - len(each) for count, each in zip(asked, alphas, strict=True)]
            chosen, known = self._trimmed(policy, requests, alphas), ahead
            own = [(count + 1) * rows for count, rows in zip(chosen, ahead, strict=True)]
            rows = batch + sum(chosen) + sum(own) + sum(forced)
            verify_s = self.pass_s(rows) + self.prompt * self.key_s(rows)
            verify_s *= 1 + self.noise * self._random.uniform(-1, 1)
            verify_s *= 1.0 if any(chosen) else missing + (1 - missing) * self.undrafted
            missing = 1.0 if any(chosen) else missing * self.lingers
            outcomes = []
            for index, (request, count) in enumerate(zip(requests, chosen, strict=True)):
                accepted = forced[index] or self._accepted(alphas[index][:count])
                lengths[index] += accepted + 1
                self.tokens += accepted + 1
                nothing = asked[index] == missing_nodes[index] > 0
                if forced[index]:
                    outcomes.append(outcome_of(request, accepted, accepted)._replace(forced=True))
                elif count or nothing:
                    outcome = outcome_of(request, count, accepted)
                    outcomes.append(outcome._replace(look_ahead_rows=own[index], missing=missing_nodes[index]))
            self.time += drafted_s + verify_s
            if self.bursts and self._random.random() < self.bursts:
                verify_s *= self._random.uniform(1, 5)
            if not paused:
                policy.observe(outcomes, StepTiming(0.0, drafted_s, drafted_s + verify_s))
        return self.tokens / self.time

    def _trimmed(
        self, policy: DraftLength, requests: Sequence[Request], alphas: Sequence[Sequence[float]]
    ) -> list[int]:
        counts = [len(each) for each in alphas]
        if self.score is None:
            return counts
        places = [index for index, count in enumerate(counts) if count]
        drafts = [
            ScoredDraft(requests[index], [self.score(alpha) for alpha in alphas[index]], range(-1, counts[index] - 1))
            for index in places
        ]
        for index, count in zip(places, policy.trim(drafts) if drafts else [], strict=True):
            counts[index] = count
        return counts

    def _alpha(self, index: int, place: int) -> float:
        return self.alpha(place) if self.only in (None, index) else 0.0

    def _accepted(self, alphas: Sequence[float]) -> int:
        for count, alpha in enumerate(alphas):
            if self._random.random() >= alpha:
                return count
        return len(alphas)


def outcome_of(request: Request, drafted: int, accepted: int) -> DraftOutcome:
    """Return the outcome of a chain."""
    tested = min(drafted, accepted + 1)
    ones = [1] * drafted
    return DraftOutcome(
        request,
        ones,
        [1] * tested + [0] * (drafted - tested),
        [1] * accepted + [0] * (drafted - accepted),
        range(accepted),
    )
