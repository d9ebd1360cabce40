"""Compares greedy and seeded texts with and without speculation, alone and batched, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speculant.engine import Runtime
from speculant.kernels import gumbel
from speculant.lab.exactness.texts import TargetReader, complete, longest_of, reread
from speculant.params import SamplingParams
from speculant.sampling import KeyedNoise, Node, mix_in
from speculant.types import Request

# Differences of log-probabilities, in nats, that rounding explains where a row's bits depend on other rows.
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5}
WAYS = {"plain, together": (False, False), "speculative, alone": (True, True), "speculative, together": (True, False)}


@dataclass(frozen=True)
class TextComparison:
    """One way to run texts, compared with each text alone and without speculation.

    gap: the largest first difference, in nats between the two tokens' log-probabilities under the target; None if no
    text differs. bound: the largest gap that rounding explains; None = no gap is allowed, infinite = a filter may have
    cut one of the tokens, so that no bound exists.
    """

    kind: str
    way: str
    texts: int
    agreeing: int
    tokens: int
    gap: float | None
    bound: float | None

    @property
    def passed(self) -> bool:
        """Whether all texts agree, or differ as rounding may make them."""
        return self.gap is None or (self.bound is not None and self.gap <= self.bound)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON; infinite ones become None."""
        return {
            "requests": self.kind,
            "way": self.way,
            "texts": self.texts,
            "agreeing": self.agreeing,
            "tokens": self.tokens,
            "bitwise": self.bound is None,
            "first_difference_gap_nats": _finite(self.gap),
            "explained_by_rounding_nats": _finite(self.bound),
            "passed": self.passed,
        }


def compare(
    runtime: Runtime, kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[TextComparison]:
    """Run prompts in every way of `WAYS`, sampled ones with a seed each, and compare the texts."""
    settings = [params if params.greedy else replace(params, seed=seed) for seed in range(len(prompts))]
    plain = [replace(each, speculation=False) for each in settings]
    expected = complete(runtime, prompts, plain, alone=True)
    found = []
    for way, (speculating, alone) in WAYS.items():
        texts = complete(runtime, prompts, settings if speculating else plain, alone)
        gaps = [first_gap(runtime, *pair) for pair in zip(expected, texts, strict=True)]
        differing = [gap for gap in gaps if gap is not None]
        tokens = sum(text.num_output for text in expected)
        agreeing, gap = len(texts) - len(differing), max(differing, default=None)
        found.append(TextComparison(kind, way, len(texts), agreeing, tokens, gap, explained(runtime, params)))
    return found


def explained(runtime: Runtime, params: SamplingParams) -> float | None:
    """Return the largest gap that rounding explains; see `TextComparison`."""
    if runtime.checkpoint.backend.row_invariant:
        return None
    if not params.greedy and is_filtered(params):
        return math.inf
    return ROUNDING[runtime.checkpoint.dtype] / (1.0 if params.greedy else min(1.0, params.temperature))


def is_filtered(params: SamplingParams) -> bool:
    """Whether rounding at the border of a filter can make a token impossible."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def first_gap(runtime: Runtime, expected: Request, other: Request) -> float | None:
    """Return the gap in nats between two texts' tokens where they first differ; None if they don't."""
    pairs = list(zip(expected.output, other.output, strict=False))
    first = next((index for index, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if first is None:
        return None if expected.num_output == other.num_output else math.inf
    prefix = reread(expected, first)
    mine, theirs = _preferences(runtime, prefix, torch.tensor(pairs[first])).tolist()
    return abs(mine - theirs) if math.isfinite(mine - theirs) else math.inf


def _preferences(runtime: Runtime, request: Request, tokens: Tensor) -> Tensor:
    """Return the target's scores of next tokens: log p, plus the position's noise if there is a seed."""
    unfiltered = replace(request, params=replace(request.params, top_k=0, top_p=1.0, min_p=0.0))
    reader = TargetReader(runtime, 1, longest_of(request))
    logs = reader.distributions([Node(unfiltered, softened=True)])[0, tokens].log().cpu()
    if request.params.greedy:
        return logs
    key = KeyedNoise(request.seed, len(request.tokens)).take_keys(1)
    return logs + gumbel(mix_in(*key), tokens)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
