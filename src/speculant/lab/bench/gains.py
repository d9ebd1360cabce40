"""The gain from speculation in a run: measured costs, and the speed that the formula predicts from them.

Together with the figures of a run (`BenchRun.figures`) and the memory of a draft model (`lab/bench/sizes.py`) these
are the metrics of a report of speculative decoding (docs/references.md, metrics).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from speculant.lab.bench.runs import BenchRun
from speculant.lab.theory import VerificationCurve, best_length, expected_tokens, speedups, step_costs, survival

LONGEST = 32  # the longest draft that is considered
LEAST = 1e-6  # of a cost


def gain(plain: BenchRun, drafted: BenchRun) -> dict[str, float]:
    """Return the gain of a run with drafts over one without, by name; {} if a run has no steps to compare.

    draft_length: mean nodes of a draft. cost_ratio: c, the time to draft one more token / plain decoding's step.
    verification_ratio: V, the rest of a step / plain decoding's step. predicted_speed: by these, the pooled acceptance
    rate, the length of each draft and theorem 3.8 of arXiv 2211.17192; a step without a draft gives one token.
    best_length, best_speed: the highest predicted speed if every step has a draft, and V grows linearly with the rows.

    A step takes the time from one burst of tokens to the next. Only the time of drafting includes prompts: a draft
    model reads the prompt when it first drafts. For a drafter that drafts trees, lengths are numbers of nodes.
    """
    spec, before, after = drafted.speculation, _step_s(plain), _step_s(drafted)
    if not spec.num_tested_tokens or before is None or after is None:
        return {}
    length = spec.num_draft_tokens / spec.num_spec_steps
    cost_ratio = drafted.draft_s / drafted.steps / length / before
    rest = max(LEAST, after / before - length * cost_ratio)
    rows = max(2, round(1 + length))
    reached = survival(spec.acceptance_rate, LONGEST)
    speeds = speedups(reached, step_costs(cost_ratio, VerificationCurve((1, rows), (1.0, rest)), LONGEST))
    best = best_length(speeds)
    return {
        "draft_length": length,
        "cost_ratio": cost_ratio,
        "verification_ratio": rest,
        "predicted_speed": _tokens_per_step(drafted) / (length * cost_ratio + rest),
        "best_length": best,
        "best_speed": float(speeds[best]),
    }


def _tokens_per_step(run: BenchRun) -> float:
    """Return the expected tokens of a step after a request's first token, by the length of each draft."""
    spec = run.speculation
    expected = expected_tokens(survival(spec.acceptance_rate, max(spec.per_step_drafted)))
    steps = max(spec.num_spec_steps, sum(len(timing.pauses) for timing in run.timings))
    return 1 + float(sum(expected[length] - 1 for length in spec.per_step_drafted)) / steps


def gains(plain: Sequence[BenchRun], drafted: Sequence[BenchRun]) -> list[dict[str, float]]:
    """Return the gain of each round that has one."""
    found = [gain(*runs) for runs in zip(plain, drafted, strict=True)]
    return [each for each in found if each]


def _step_s(run: BenchRun) -> float | None:
    """Return the typical time from one burst of tokens to the next; None if no request has two."""
    pauses = [pause for timing in run.timings for pause in timing.pauses]
    return statistics.mean(pauses) if pauses else None
