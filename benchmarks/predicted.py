"""Speed predicted from acceptance and costs beside speed measured, for drafters and draft lengths 1 to 10.

    python benchmarks/predicted.py [--methods suffix] [--texts completion] [--rounds 12]

Engines run in turn, on prompts of the round's own. Acceptance is seen in drafts of 10 tokens: from each step on, so
many tokens were drafted and so many accepted. A shorter draft is taken to be accepted at the same places of the text,
so that such a run takes several steps; a draft of 10 that is accepted whole is taken to go on in the next step's.
Trees have another shape at each size, so theirs is seen at each. Costs are the medians of a round's steps by the nodes
of their drafts, linear between those that were seen. A round's predicted speed is that of these steps over plain
decoding, its measured one plain decoding's time over the length's; figures are medians over rounds. Prompts count in
neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from measuring import keep, spread
from never_slower import METHODS, Pair, prompts, run

from speculant.engine.build import Runtime
from speculant.lab.inflation.pair import SHAPES
from speculant.lengths.base import DraftOutcome
from speculant.metrics import StepTiming

LENGTHS = range(1, 11)
FEWEST = 5  # steps of a size whose median counts
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

    def begin(self, is_first: bool) -> None:
        """Begin a request, before which nothing was decoded; the first one of a round forgets what was seen."""
        self._before = None
        if is_first:
            self.seconds.clear()
            self.outcomes.clear()


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


def joined(outcomes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join each draft of the longest length that was accepted whole to the next one, whose continuation that is."""
    found: list[tuple[int, int]] = []
    goes_on = False
    for drafted, accepted in outcomes:
        if goes_on:
            before, _ = found.pop()  # all of it was accepted, and one token more
            found.append((before + 1 + drafted, before + 1 + accepted))
        else:
            found.append((drafted, accepted))
        goes_on = drafted == accepted == LONGEST
    return found


def measure(arguments: argparse.Namespace, pair: Pair, kind: str, name: str) -> dict[str, Any]:
    """Compare prediction and measurement for one method on one kind of text."""
    base = METHODS[name]
    engines: dict[int, Runtime] = {0: pair.engine(1, None)}
    for length in LENGTHS:
        engines[length] = pair.engine(1, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
    every = prompts(kind, engines[0], arguments.prompts * (1 + arguments.rounds))
    branches = engines[LONGEST].engine._drafters.find(str(base["method"])).needs.emits_tree
    steps = {length: Steps(engines[length]) for length in LENGTHS}
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for first in range(0, len(every), arguments.prompts):
        seconds = dict[int, float]()
        for length, runtime in engines.items():
            watched = steps.get(length)
            for place, prompt in enumerate(every[first : first + arguments.prompts]):
                if watched is not None:
                    watched.begin(is_first=place == 0)
                seconds[length] = seconds.get(length, 0.0) + run(runtime, [prompt], arguments.tokens).decode_s
        plain_s = seconds[0] / (arguments.prompts * (arguments.tokens - 1))
        costs = {0: plain_s, **costs_of(steps.values())}
        if first:  # the first round warms up
            for length in LENGTHS:
                outcomes = steps[length].outcomes if branches else joined(steps[LONGEST].outcomes)
                found[length].append((plain_s / predict(length, outcomes, costs), seconds[0] / seconds[length]))
    return {
        str(length): {
            "predicted": spread([expected for expected, _ in own]),
            "measured": spread([seen for _, seen in own]),
            "over": spread([expected / seen for expected, seen in own]),
        }
        for length, own in found.items()
    }


def costs_of(engines: Iterable[Steps]) -> dict[int, float]:
    """Return the median seconds of the steps of all engines by the nodes of their drafts."""
    seconds = defaultdict[int, list[float]](list)
    for steps in engines:
        for nodes, own in steps.seconds.items():
            seconds[nodes] += own
    return {nodes: statistics.median(own) for nodes, own in seconds.items() if len(own) >= FEWEST}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--texts", nargs="+", default=["edit", "completion"])
    drafting = [name for name in METHODS if name not in ("as large as the target", "default")]
    parser.add_argument("--methods", nargs="+", default=drafting)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    pair = Pair.load(arguments.shape)
    title = f"predicted_{arguments.shape}" if arguments.shape else "predicted"
    seen: dict[str, dict[str, Any]] = {kind: {} for kind in arguments.texts}
    for kind, found in seen.items():
        for name in arguments.methods:
            found[name] = measure(arguments, pair, kind, name)
            keep(title, PREDICTED, seen)  # a later one may fail
    print(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
