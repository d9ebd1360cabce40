"""Speed predicted from acceptance and costs beside speed measured, for drafters and draft lengths 1 to 10.

    python benchmarks/predicted.py [--methods suffix] [--texts completion] [--rounds 5]

Engines run in turn, on prompts of the round's own. Acceptance is counted in drafts of 10 tokens: how often at least k
of them are accepted. Costs are the medians of steps at lengths 1, 4 and 10, by the nodes of their drafts, and linear
between them. A length's predicted speed is its expected tokens per step, over the expected time of a step, relative to
plain decoding. The measured speed is the median over rounds of plain decoding's time over the length's; prompts do not
count in either.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measuring import spread, write
from never_slower import DRAFT_SHAPES, METHODS, Pair, prompts, run

from speculant.engine.build import Runtime
from speculant.metrics import StepTiming
from speculant.scheduling.draft_length.base import DraftOutcome

LENGTHS, KNOTS = range(1, 11), (1, 4, 10)
LONGEST = max(LENGTHS)
PREDICTED = "Within 10% for every drafter and length."


class Steps:
    """An engine's steps by the nodes of their drafts: how many, their seconds up to the next, and what was accepted."""

    def __init__(self, runtime: Runtime) -> None:
        self._before: tuple[int, float] | None = None
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self.accepted = Counter[int]()  # steps by the number of accepted nodes
        policy = runtime.engine._context.draft_length
        self._observe = policy.observe
        policy.observe = self._record  # type: ignore[method-assign]

    def _record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        if self._before is not None:
            self.seconds[self._before[0]].append(timing.started - self._before[1])
        self._before = sum(sum(outcome.drafted) for outcome in outcomes), timing.started
        self.accepted[sum(sum(outcome.accepted) for outcome in outcomes)] += 1
        self._observe(outcomes, timing)

    def pause(self) -> None:
        """Forget the last step's start: what follows is not decoding."""
        self._before = None

    def typical(self, nodes: int) -> float:
        """Return the median seconds of a step with so many nodes."""
        return statistics.median(self.seconds[nodes])

    def share(self, counts: Mapping[int, int], least: int) -> float:
        """Return the share of the steps that count at least so much."""
        return sum(number for count, number in counts.items() if count >= least) / sum(counts.values())

    @property
    def drafted(self) -> dict[int, int]:
        """How many steps had drafts of so many nodes."""
        return {nodes: len(seconds) for nodes, seconds in self.seconds.items()}


def predict(length: int, steps: Steps, costs: Mapping[int, float]) -> float:
    """Return the expected tokens per second of a length. costs: seconds of a step by the nodes of its draft."""
    drafted = [steps.share(steps.drafted, k) for k in range(length + 1)]
    sizes = [drafted[k] - drafted[k + 1] for k in range(length)] + [drafted[length]]
    seconds = np.interp(range(length + 1), sorted(costs), [costs[size] for size in sorted(costs)])
    return (1 + sum(steps.share(steps.accepted, k) for k in range(1, length + 1))) / float(np.dot(sizes, seconds))


def measure(arguments: argparse.Namespace, pair: Pair, kind: str, name: str) -> dict[str, Any]:
    """Compare prediction and measurement for one method on one kind of text."""
    base = METHODS[name]
    engines: dict[int, Runtime] = {0: pair.engine(1, None)}
    for length in LENGTHS:
        engines[length] = pair.engine(1, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
    every = prompts(kind, engines[0], arguments.prompts * (1 + arguments.rounds))
    watched, times, plain_s = dict[int, Steps](), {length: list[float]() for length in engines}, list[float]()
    for first in range(0, len(every), arguments.prompts):
        for length, runtime in engines.items():
            if first == arguments.prompts and length in KNOTS:
                watched[length] = Steps(runtime)
            seconds = 0.0
            for prompt in every[first : first + arguments.prompts]:
                if length in watched:
                    watched[length].pause()
                decode_s = run(runtime, [prompt], arguments.tokens).decode_s
                plain_s += [] if length else [decode_s / (arguments.tokens - 1)]
                seconds += decode_s
            if first:
                times[length].append(seconds)
    deepest = watched[LONGEST]
    costs = {length: watched[length].typical(length) for length in KNOTS if watched[length].seconds[length]}
    costs[0] = deepest.typical(0) if len(deepest.seconds[0]) > arguments.prompts * arguments.rounds * 2 else costs[1]
    found = dict[str, Any]()
    for length in LENGTHS:
        speed = [own / each for own, each in zip(times[0], times[length], strict=True)]
        expected = predict(length, deepest, costs) * statistics.median(plain_s)
        over = expected / statistics.median(speed)
        found[str(length)] = {"predicted": expected, "measured": spread(speed), "over": over}
    accepted = [deepest.share(deepest.accepted, k) for k in LENGTHS]
    return {"accepted": accepted, "drafted": [deepest.share(deepest.drafted, k) for k in LENGTHS], "lengths": found}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(DRAFT_SHAPES))
    parser.add_argument("--texts", nargs="+", default=["edit", "completion"])
    drafting = [name for name in METHODS if name not in ("as large as the target", "default")]
    parser.add_argument("--methods", nargs="+", default=drafting)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pair = Pair.load(arguments.shape, Path(scratch))
        seen = {
            kind: {name: measure(arguments, pair, kind, name) for name in arguments.methods} for kind in arguments.texts
        }
    write("predicted", PREDICTED, seen)


if __name__ == "__main__":
    main()
