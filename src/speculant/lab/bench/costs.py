"""The cost of an engine's step by the length of its drafts, for one sequence or several that step together."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from speculant.engine import Runtime
from speculant.errors import RequestError
from speculant.lab.bench.measuring import Spread, interleave
from speculant.metrics import EngineMetrics
from speculant.params import SamplingParams
from speculant.types import Request

STEPS = 3  # per request, whose times count
MOST_TURNS = 20  # of two rounds, forwards and backwards
SALT = "step-costs"


@dataclass(frozen=True)
class StepTime:
    """The time of one step in seconds: drafting, and the rest (the target's pass, verification, bookkeeping)."""

    draft_s: float
    other_s: float


@dataclass(frozen=True)
class LengthCosts:
    """Typical times of steps in seconds by draft length; `lengths` ascend from 0, the step of plain decoding."""

    lengths: Sequence[int]
    draft_s: Sequence[float]
    other_s: Sequence[float]

    @property
    def total_s(self) -> list[float]:
        """The whole times of steps."""
        return [draft + other for draft, other in zip(self.draft_s, self.other_s, strict=True)]

    @property
    def plain_s(self) -> float:
        """The time of a step without a draft."""
        return self.total_s[0]

    @property
    def cost_ratio(self) -> float:
        """c: the time that one more drafted token takes / plain decoding's step."""
        return self._line()[0] / self.plain_s

    @property
    def overhead(self) -> float:
        """The time of drafting that does not depend on the length / plain decoding's step."""
        return self._line()[1] / self.plain_s

    def _line(self) -> tuple[float, float]:
        """Return slope and intercept of the drafting time by least squares; neither is below 0."""
        lengths, times = np.array(self.lengths[1:]), np.array(self.draft_s[1:])
        if len(lengths) == 1:
            return 0.0, float(times[0])
        slope, first = np.polyfit(lengths, times, 1)
        if slope < 0:
            return 0.0, float(times.mean())
        if first < 0:
            return float(lengths @ times / (lengths @ lengths)), 0.0
        return float(slope), float(first)


def measure_steps(
    lengths: Mapping[str, Sequence[int]],
    runtimes: Mapping[str, Runtime],
    prompt: Sequence[int],
    params: SamplingParams,
    seconds: float,
    batch: int = 1,
) -> dict[str, LengthCosts]:
    """Measure all engines in turn, round by round, each at its own lengths, for about `seconds` or two rounds.

    The engines must draft a fixed length. batch: sequences that step together, each with a draft of that length. Raises
    RequestError if the context has no room for a draft, or if an engine runs fewer sequences at a time.
    """
    ids = (f"{SALT}-{number}" for number in itertools.count())
    subjects: dict[tuple[str, int], Callable[[], list[StepTime]]] = {
        (name, length): partial(_sample, runtimes[name], prompt, params, length, ids, batch)
        for name, own in lengths.items()
        for length in own
    }
    times: dict[tuple[str, int], list[list[StepTime]]] = {key: [] for key in subjects}
    order, started = random.Random(SALT), time.perf_counter()
    for _ in range(MOST_TURNS):
        shuffled = order.sample(list(subjects), len(subjects))  # a fixed order could keep pace with other programs
        for key, rounds in interleave({key: subjects[key] for key in shuffled}, 2).items():
            times[key] += rounds
        if time.perf_counter() - started > seconds:
            break
    return {name: _typical(own, [times[name, length] for length in own]) for name, own in lengths.items()}


def _typical(lengths: Sequence[int], times: Sequence[Sequence[Sequence[StepTime]]]) -> LengthCosts:
    """Return the lower quartiles of the times by length, over all rounds.

    Other programs only add to times. On a busy machine they disturb about half of the steps, so medians would jump from
    one length to the next.
    """
    steps = [list(itertools.chain(*rounds)) for rounds in times]
    return LengthCosts(
        lengths,
        [Spread.of([step.draft_s for step in own]).q1 for own in steps],
        [Spread.of([step.other_s for step in own]).q1 for own in steps],
    )


def _sample(
    runtime: Runtime, prompt: Sequence[int], params: SamplingParams, length: int, ids: Iterator[str], batch: int = 1
) -> list[StepTime]:
    """Run a prompt `batch` times for a few steps; return the times of steps with a draft of this length for all.

    The prompt's steps and the first draft, for which the drafter reads the prompt, do not count.
    """
    engine, named = runtime.engine, [next(ids) for _ in range(batch)]
    wanted = replace(
        params,
        speculation={"num_speculative_tokens": length} if length else False,
        max_tokens=(length + 1) * (STEPS + 3),
        min_tokens=0,
        ignore_eos=True,
    )
    decoded, source = runtime.prompt_and_source(prompt)
    requests = [
        each for name in named for each in engine.add_request(decoded, wanted, name, cache_salt=SALT, source=source)
    ]
    times = list[StepTime]()
    try:
        while not any(request.finished for request in requests) and len(times) <= STEPS:
            before, drafted = replace(engine.metrics), _drafted(requests)
            started = all(request.output for request in requests)
            engine.step()
            if started and _drafted(requests) == [count + length for count in drafted]:
                times.append(_difference(before, engine.metrics))
    finally:
        for name in named:
            engine.abort(name)
    for request in requests:
        if request.ending.error is not None:
            raise request.ending.error
    if len(times) < 2:
        raise RequestError(
            f"drafts of {length} tokens after a prompt of {len(prompt)} do not fit into the context, or are not found",
            "use a shorter prompt, a model with more positions, or a method that always drafts.",
        )
    return times[1:]


def _drafted(requests: Sequence[Request]) -> list[int]:
    return [request.metrics.speculative_decoding.num_draft_tokens for request in requests]


def _difference(before: EngineMetrics, after: EngineMetrics) -> StepTime:
    other = after.verify_s + after.other_s - before.verify_s - before.other_s
    return StepTime(after.draft_s - before.draft_s, other)


def oracle_seconds(accepted: NDArray[np.float64], costs: LengthCosts, longest: int, batch: int = 1) -> float:
    """Return the least time to commit a text by drafts of at most `longest` tokens.

    accepted [T]: 1 where a drafted token would be accepted, else 0. batch: sequences that step together in `costs`; the
    text is charged its share of steps in which all draft as much as it does. The draft passes of a batch last as long
    as its longest draft, so no real oracle reaches that.
    """
    lengths = np.arange(longest + 1)
    steps = np.interp(lengths, costs.lengths, costs.total_s) / batch
    least = np.zeros(len(accepted) + 1)
    for start in reversed(range(len(accepted))):
        rejected = np.flatnonzero(accepted[start:] < 1)
        most = min(int(rejected[0]) if len(rejected) else longest, longest, len(accepted) - start - 1)
        least[start] = min(steps[length] + least[start + length + 1] for length in range(most + 1))
    return float(least[0])
