"""Speed predicted from acceptance and costs beside speed measured, for drafters and draft lengths 1 to 10.

    python benchmarks/predicted.py [--methods suffix] [--texts completion] [--rounds 5]

Acceptance is counted once, in drafts of 10 tokens: how often at least k of them are accepted. Costs are the medians of
steps at lengths 1, 4 and 10, by their rows, and linear between them. A length's predicted speed is its expected tokens
per step, over the expected time of a step, relative to plain decoding. The measured speed is the median over rounds
in which all lengths run in turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from measuring import interleave, spread, write
from never_slower import METHODS, engine, prompts, run

from speculant import LLM
from speculant.metrics import StepTiming

LENGTHS, KNOTS = range(1, 11), (1, 4, 10)
PREDICTED = "Within 10% for every drafter and length."


class Steps:
    """The seconds of an engine's steps, from the start of one to that of the next, by the nodes of their drafts."""

    def __init__(self, llm: LLM) -> None:
        self._before: tuple[int, float] | None = None
        self.seconds: dict[int, list[float]] = defaultdict(list)
        policy = llm.engine._context.draft_length
        self._observe = policy.observe
        policy.observe = self._record  # type: ignore[method-assign]

    def _record(self, outcomes: Any, timing: StepTiming) -> None:
        if self._before is not None:
            self.seconds[self._before[0]].append(timing.started - self._before[1])
        self._before = sum(sum(outcome.drafted) for outcome in outcomes), timing.started
        self._observe(outcomes, timing)

    def typical(self, nodes: int) -> float:
        """Return the median seconds of a step with so many nodes."""
        return statistics.median(self.seconds[nodes])


def acceptance(llm: LLM, batch: list[list[int]], tokens: int) -> tuple[list[float], list[float]]:
    """Return, for k up to 10, how often a step's draft has k tokens or more, and how often as many are accepted."""
    drafted, accepted, steps = [0] * 11, [0] * 11, 0
    policy = llm.engine._context.draft_length
    observe = policy.observe

    def count(outcomes: Any, timing: StepTiming) -> None:
        nonlocal steps
        steps += 1
        for outcome in outcomes:
            for k in range(1, 11):
                drafted[k] += sum(outcome.drafted) >= k
                accepted[k] += sum(outcome.accepted) >= k
        observe(outcomes, timing)

    policy.observe = count  # type: ignore[method-assign]
    run(llm, batch, tokens)
    policy.observe = observe  # type: ignore[method-assign]
    return [each / steps for each in drafted], [each / steps for each in accepted]


def predict(length: int, drafted: list[float], accepted: list[float], costs: Mapping[int, float]) -> float:
    """Return the expected tokens per second of a length. costs: seconds of a step by the nodes of its draft."""
    sizes = [1 - drafted[1], *(drafted[k] - drafted[k + 1] for k in range(1, length)), drafted[length]]
    seconds = np.interp(range(length + 1), sorted(costs), [costs[size] for size in sorted(costs)])
    return (1 + sum(accepted[1 : length + 1])) / float(np.dot(sizes, seconds))


def measure(arguments: argparse.Namespace, kind: str, name: str) -> dict[str, Any]:
    """Compare prediction and measurement for one method on one kind of text."""
    base, plain = METHODS[name], engine(arguments, None)
    engines = {
        length: engine(arguments, {**base, "num_speculative_tokens": length, "draft_length": "fixed"})
        for length in LENGTHS
    }
    batch = prompts(kind, plain._runtime, arguments.prompts)
    for llm in (plain, *engines.values()):
        run(llm, batch, arguments.tokens)
    drafted, accepted = acceptance(engines[10], batch, arguments.tokens)
    watched = {0: Steps(plain), **{length: Steps(engines[length]) for length in KNOTS}}
    subjects = {"plain": partial(run, plain, batch, arguments.tokens)}
    subjects |= {str(length): partial(run, llm, batch, arguments.tokens) for length, llm in engines.items()}
    times = interleave(subjects, arguments.rounds)
    costs = {length: watched[length].typical(length) for length in KNOTS if watched[length].seconds[length]}
    costs[0] = watched[10].typical(0) if len(watched[10].seconds[0]) > len(batch) * arguments.rounds * 2 else costs[1]
    found = dict[str, Any]()
    for length in LENGTHS:
        speed = [own / each for own, each in zip(times["plain"], times[str(length)], strict=True)]
        expected = predict(length, drafted, accepted, costs) * watched[0].typical(0)
        found[str(length)] = {
            "predicted": expected,
            "measured": spread(speed),
            "over": expected / statistics.median(speed),
        }
    return {"accepted": accepted[1:], "drafted": drafted[1:], "lengths": found}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", nargs="+", default=["edit", "completion"])
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name[:2] != "as"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    arguments.batch = 1
    seen = {kind: {name: measure(arguments, kind, name) for name in arguments.methods} for kind in arguments.texts}
    write("predicted", PREDICTED, seen)


if __name__ == "__main__":
    main()
