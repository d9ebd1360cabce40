"""Tests by scores whether tokens follow the distributions from which they were drawn, without a second sample.

Let p_t be the target's distribution at token t, f_t any function of the tokens that is fixed before x_t is drawn. If
x_t ~ p_t, the sum of f_t(x_t) - E f_t is a martingale, and over many tokens nearly normal:

    Z = sum_t (f_t(x_t) - E f_t) / sqrt(sum_t Var f_t)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

FALSE_ALARM = 1e-3  # probability that a correct sampler fails any of the tests of one check
POWER = 0.95  # probability that a test finds a shift of the reported size
LOWEST_LOGPROB = -12.0  # lower ones are raised to it, so that one token can't decide a test


@dataclass
class Score:
    """One f, summed over tokens."""

    name: str
    what: str  # the expectation that would shift
    unit: str
    num_tokens: int = 0
    observed: float = 0.0  # sum of f(x)
    expected: float = 0.0  # sum of E f
    variance: float = 0.0  # sum of Var f

    def add(self, p: Tensor, f: Tensor, tokens: Tensor) -> None:
        """Count tokens [r] under distributions p [r, V]; f is [r, V]."""
        means = (p * f).sum(-1, keepdim=True)
        self.num_tokens += len(tokens)
        self.observed += float(f.gather(1, tokens[:, None]).sum())
        self.expected += float(means.sum())
        self.variance += float((p * (f - means) ** 2).sum())

    @property
    def z(self) -> float:
        """Z; 0 where all distributions are point masses."""
        return (self.observed - self.expected) / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """The two-sided probability of a Z at least as far from 0 if every token follows its distribution."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    def detectable(self, level: float, power: float = POWER) -> float | None:
        """Return the smallest shift of E f, the same at every token, that a test at `level` finds with `power`.

        None where all distributions are point masses.
        """
        if not self.variance:
            return None
        normal = NormalDist()
        return (normal.inv_cdf(1 - level / 2) + normal.inv_cdf(power)) * math.sqrt(self.variance) / self.num_tokens

    def to_dict(self, level: float) -> dict[str, Any]:
        """Return the figures as plain values for JSON, and whether the test passes at `level`."""
        count = max(1, self.num_tokens)
        return {
            "test": self.name,
            "what": self.what,
            "unit": self.unit,
            "tokens": self.num_tokens,
            "observed": self.observed / count,
            "expected": self.expected / count,
            "z": self.z,
            "p_value": self.p_value,
            "level": level,
            "detectable_shift": self.detectable(level),
            "power": POWER,
            "passed": self.p_value >= level,
        }


@dataclass
class Scores:
    """The tests of one check, with f = whether a token is the target's likeliest, log p, and whether q > p."""

    favourite: Score = field(
        default_factory=lambda: Score("favourite", "the probability of the target's likeliest token", "probability")
    )
    logprob: Score = field(default_factory=lambda: Score("log p", "the mean log-probability under the target", "nats"))
    drafted: Score = field(
        default_factory=lambda: Score("q > p", "the probability of the tokens with q > p", "probability")
    )
    impossible: int = 0  # tokens whose probability is 0

    def add(self, p: Tensor, tokens: Tensor, q: Tensor, drafted: Sequence[int]) -> None:
        """Count tokens [r] under the target's probs p [r, V]; q [k, V] are the draft's, of the rows `drafted`."""
        self.impossible += int((p.gather(1, tokens[:, None]) <= 0).sum())
        likeliest = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
        self.favourite.add(p, likeliest, tokens)
        self.logprob.add(p, p.log().clamp(min=LOWEST_LOGPROB), tokens)
        if drafted:
            rows = list(drafted)
            self.drafted.add(p[rows], (q > p[rows]).to(p), tokens[rows])

    @property
    def made(self) -> list[Score]:
        """The tests that have tokens."""
        return [score for score in (self.favourite, self.logprob, self.drafted) if score.num_tokens]

    @property
    def level(self) -> float:
        """The level of each test, by Bonferroni's bound."""
        return FALSE_ALARM / max(1, len(self.made))
