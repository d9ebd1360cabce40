"""Speed predicted from acceptance and costs beside speed measured, for drafters and draft lengths 1 to 10.

    python benchmarks/predicted.py [--methods suffix] [--texts completion] [--rounds 12]

Engines run in turn, on prompts of the round's own. Acceptance is seen in drafts of 10 tokens: from each step on, so
many tokens were drafted and so many accepted. A shorter draft is taken to be accepted at the same places of the text,
so that such a run takes several steps. Trees have another shape at each size, so theirs is seen at each. Costs are
the medians of steps at lengths 1, 4 and 10, by the nodes of their drafts, and linear between them. The predicted speed
is that of these steps over plain decoding. The measured one is the median over rounds of plain decoding's time over the
length's. Prompts count in neither.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
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
    """An engine's steps: their seconds up to the next by the nodes of their drafts, and what became of these."""

    def __init__(self, runtime: Runtime) -> None:
        self._before: tuple[int, float] | None = None
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self.outcomes: list[tuple[int, int]] = []  # drafted and accepted nodes
        policy = runtime.engine._context.draft_length
        self._observe = policy.observe
        policy.observe = self._record  # type: ignore[method-assign]

    def _record(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        drafted = sum(sum(outcome.drafted) for outcome in outcomes)
        if self._before is not None:
            self.seconds[self._before[0]].append(timing.started - self._before[1])
            self.outcomes.append((drafted, sum(sum(outcome.accepted) for outcome in outcomes)))
        self._before = drafted, timing.started
        self._observe(outcomes, timing)

    def pause(self) -> None:
        """Forget the last step's start: what follows is not decoding."""
        self._before = None


def predict(length: int, outcomes: Sequence[tuple[int, int]], costs: Mapping[int, float]) -> float:
    """Return the expected seconds per token of a length.

    outcomes: drafted and accepted nodes of longer drafts, or of these. costs: seconds of a step by its draft's nodes.
    """
    seconds = np.interp(range(length + 1), sorted(costs), [costs[size] for size in sorted(costs)])
    total, tokens = 0.0, 0
    for drafted, accepted in outcomes:
        place = 0
        while place <= accepted:
            nodes = min(length, max(drafted - place, 0))
            total += seconds[nodes]
            place += min(nodes, accepted - place) + 1
        tokens += accepted + 1
    return total / tokens


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
            if first == arguments.prompts and length:
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
    costs = {length: statistics.median(watched[length].seconds[length] or [np.inf]) for length in KNOTS}
    costs = {length: each for length, each in costs.items() if each < np.inf}
    undrafted = [each for length in LENGTHS for each in watched[length].seconds[0]]
    costs[0] = statistics.median(undrafted) if len(undrafted) > 50 else statistics.median(plain_s)
    branches = engines[LONGEST].engine._drafters.find(str(base["method"])).needs.emits_tree
    found = dict[str, Any]()
    for length in LENGTHS:
        speed = [own / each for own, each in zip(times[0], times[length], strict=True)]
        outcomes = watched[length if branches else LONGEST].outcomes
        expected = statistics.median(plain_s) / predict(length, outcomes, costs)
        over = expected / statistics.median(speed)
        found[str(length)] = {"predicted": expected, "measured": spread(speed), "over": over}
    return {"costs": costs, "lengths": found}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(DRAFT_SHAPES))
    parser.add_argument("--texts", nargs="+", default=["edit", "completion"])
    drafting = [name for name in METHODS if name not in ("as large as the target", "default")]
    parser.add_argument("--methods", nargs="+", default=drafting)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=1)
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
