"""Speed predicted from acceptance and costs beside speed measured, for drafters and draft lengths 1 to 10.

Engines run in turn, on prompts of the round's own. Acceptance is observed in drafts of 10 tokens: each step has a
number of drafted tokens and a number of accepted ones. A shorter draft is assumed to be accepted at the same places of
the text, so a long accepted draft becomes several shorter steps; a draft of 10 that is accepted whole is assumed to go
on in the next step's draft. The shape of a tree depends on its size, so the acceptance of trees is observed at each
size. Costs are the medians of a round's steps by the nodes of their drafts, with linear interpolation. A round's
predicted speed is that of these steps over plain decoding, its measured speed is plain decoding's time over the
length's; figures are medians over rounds. Neither includes the prompts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from speculant.engine import Runtime
from speculant.lab.bench import DRAFT, SHAPE, Benchmark, LoadedPair, by_text_and_method, decode, prompts_of, quartiles
from speculant.lab.bench.decoding import PLAIN
from speculant.lengths import DraftOutcome
from speculant.metrics import StepTiming

METHODS = ["draft_model", "suffix", "prompt_lookup", "ngram", "token_recycling", "fallback", "random"]
LENGTHS = range(1, 11)
FEWEST = 5  # steps of a size whose median counts
LONGEST = max(LENGTHS)
Outcomes = Sequence[tuple[int, int]]  # drafted and accepted nodes


class Steps:
    """An engine's steps: their seconds up to the next step by the nodes of their drafts, and the drafts' outcomes."""

    def __init__(self, runtime: Runtime) -> None:
        self._before: tuple[int, float] | None = None
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self.outcomes: list[tuple[int, int]] = []
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
        """Begin a request; the first one of a round clears the figures of the round before."""
        self._before = None
        if is_first:
            self.seconds.clear()
            self.outcomes.clear()


def predict(length: int, outcomes: Outcomes, costs: Mapping[int, float]) -> float:
    """Return the expected seconds per token of a length.

    outcomes: of drafts of this length or longer ones. costs: seconds of a step by the nodes of its draft.
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


def joined(outcomes: Outcomes) -> Outcomes:
    """Join each draft of the longest length that was accepted whole to the next draft, which continues it."""
    found: list[tuple[int, int]] = []
    goes_on = False
    for drafted, accepted in outcomes:
        before = found.pop()[0] + 1 if goes_on else 0  # the whole draft, and the token after it
        found.append((before + drafted, before + accepted))
        goes_on = drafted == accepted == LONGEST
    return found


def costs_of(engines: Iterable[Steps]) -> dict[int, float]:
    """Return the median seconds of all engines' steps by the nodes of their drafts."""
    seconds = defaultdict[int, list[float]](list)
    for nodes, own in itertools.chain(*(steps.seconds.items() for steps in engines)):
        seconds[nodes] += own
    return {nodes: statistics.median(own) for nodes, own in seconds.items() if len(own) >= FEWEST}


def compare(arguments: argparse.Namespace, pair: LoadedPair, text: str, method: str) -> dict[str, Any]:
    """Compare prediction and measurement for one method on one kind of text."""
    base = {"method": method, **({"model": DRAFT} if method == "draft_model" else {})}
    engines: dict[int, Runtime] = {0: pair.engine(**PLAIN)}
    for length in LENGTHS:
        engines[length] = pair.engine(1, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
    size = arguments.prompts
    every = prompts_of(text, engines[0].tokenizer, size * (1 + arguments.rounds))
    is_tree = engines[LONGEST].engine._drafters.find(method).needs.emits_tree
    steps = {length: Steps(engines[length]) for length in LENGTHS}
    found: dict[int, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for first in range(0, len(every), size):
        seconds = dict.fromkeys(engines, 0.0)
        for (length, runtime), place in itertools.product(engines.items(), range(size)):
            if length in steps:
                steps[length].begin(is_first=place == 0)
            seconds[length] += decode(runtime, [every[first + place]], arguments.tokens).decode_s
        plain_s = seconds[0] / (size * (arguments.tokens - 1))
        costs = {0: plain_s, **costs_of(steps.values())}
        for length in LENGTHS if first else ():  # the first round warms up
            outcomes = steps[length].outcomes if is_tree else joined(steps[LONGEST].outcomes)
            found[length].append((plain_s / predict(length, outcomes, costs), seconds[0] / seconds[length]))
    return {
        str(length): {
            "predicted": quartiles([expected for expected, _ in own]),
            "measured": quartiles([seen for _, seen in own]),
            "over": quartiles([expected / seen for expected, seen in own]),
        }
        for length, own in found.items()
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare all methods on all texts."""
    arguments.name = "predicted" if arguments.shape == "demo" else f"predicted_{arguments.shape}"
    return by_text_and_method(arguments, compare)


BENCHMARK = Benchmark(
    __file__, __doc__, predicted="Within 10% for every drafter and length.", measure=measure, rounds=12,
    options={
        "shape": SHAPE,
        "texts": ["edit", "completion"], "methods": METHODS, "prompts": 1, "tokens": 128,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
