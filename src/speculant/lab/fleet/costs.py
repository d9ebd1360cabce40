"""The time of one step of a replica, from measured costs, and the draft length that it would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from speculant.errors import ConfigError
from speculant.lab.fleet.config import LONGEST, ReplicaLimits
from speculant.lab.theory import VerificationCurve, expected_tokens, survival


@dataclass(frozen=True)
class EngineCosts:
    """The measured costs of one engine.

    seconds: of a target pass by its rows. rates: acceptance by depth. cost_ratio: c, a draft token's time over that of
    a target pass with as many rows as sequences. draft_overhead: the fixed time of a draft over a pass of one row.
    step_s: of each step beside the passes. sequence_s: of each sequence of a step after the first. admit_s: of a step
    for each request that it admits, such as the server's work on the engine's core. request_s: of each request where
    it delays no other. spread: standard deviation of the first rate between requests.
    prompt_share: rows that a row of a prompt counts as. It is less than a verified one, which has logits and a verdict.
    """

    seconds: VerificationCurve
    rates: tuple[float, ...] = (0.0,)
    cost_ratio: float = 0.0
    draft_overhead: float = 0.0
    step_s: float = 0.0
    sequence_s: float = 0.0
    admit_s: float = 0.0
    request_s: float = 0.0
    spread: float = 0.0
    prompt_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ConfigError(f"alpha={list(self.rates)} is not between 0 and 1", "use for example --alpha 0.8.")
        for name in ("cost_ratio", "draft_overhead", "step_s", "sequence_s", "admit_s", "request_s", "prompt_share"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is not a number of 0 or more", f"set {name} to 0.")
        mean = self.rates[0]
        if self.spread and not 0 <= self.spread**2 < mean * (1 - mean):
            raise ConfigError(
                f"alpha varies by {self.spread} around {mean}, which no distribution between 0 and 1 does",
                "use for example --alpha-spread 0.1, or 0.",
            )


class StepTable:
    """Times of steps, computed once for all replicas of a fleet. `reached[k]`: the first k tokens are accepted."""

    def __init__(self, costs: EngineCosts, limits: ReplicaLimits) -> None:
        most = limits.max_num_batched_tokens
        rows = np.arange(math.ceil(most * max(1.0, costs.prompt_share)) + 1).clip(min=1)
        first_s = costs.seconds.costs[0]
        self.costs, self.most_rows = costs, most
        self.reached: list[float] = survival(costs.rates, LONGEST).tolist()
        self._pass_s: list[float] = (costs.seconds.relative(rows) * first_s).tolist()
        self._expected: list[float] = expected_tokens(survival(costs.rates, LONGEST)).tolist()
        self._draft_s, self._fixed = costs.draft_overhead * first_s, limits.fixed_length
        self._chosen = dict[tuple[int, int], int]()

    def step_s(
        self, rows: int, prompt_rows: int, sequences: int, drafting: int = 0, length: int = 0, unread: int = 0
    ) -> float:
        """Return the seconds of a step.

        rows: of the target's pass, beside prompt_rows. drafting: sequences with drafts of that length. unread: prompt
        tokens that the drafter reads before.
        """
        costs = self.costs
        seconds = self._pass_s[rows + round(prompt_rows * costs.prompt_share)]
        seconds += costs.step_s + costs.sequence_s * (sequences - 1)
        if length:
            seconds += self._draft_s + length * costs.cost_ratio * self._pass_s[drafting]
        while unread > 0:
            seconds += costs.cost_ratio * self._pass_s[round(min(unread, self.most_rows) * costs.prompt_share)]
            unread -= self.most_rows
        return seconds

    def length(self, decoding: int, prompt_rows: int, reading: int) -> int:
        """Return the draft length of a step that decodes some sequences, and reads rows of some prompts.

        Drafts use leftover rows. Of all lengths that fit, the one with the most expected tokens per second is chosen.
        """
        if not decoding:
            return 0
        most = min(LONGEST, (self.most_rows - prompt_rows) // decoding - 1)
        if self._fixed is not None:
            return min(self._fixed, most)
        key = decoding, prompt_rows
        if key not in self._chosen:
            sequences = decoding + reading

            def rate(length: int) -> float:
                seconds = self.step_s(decoding * (length + 1), prompt_rows, sequences, decoding, length)
                return (decoding * self._expected[length] + reading) / seconds

            self._chosen[key] = max(range(most + 1), key=rate)
        return self._chosen[key]
