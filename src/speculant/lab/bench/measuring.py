"""Runs a workload in several modes, in turn, and summarises the figures: medians, quartiles, ratios.

`measure_steps` measures the cost of a step by the length of its drafts, for one sequence or several together.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from speculant.engine import Runtime
from speculant.errors import RequestError
from speculant.lab.bench.workloads import Workload
from speculant.metrics import EngineMetrics, SpeculationMetrics, TimingMetrics, percentile
from speculant.params import SamplingParams
from speculant.structured import banned_tokens
from speculant.text import TextStream, compile_stops
from speculant.types import Request, StepOutput

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Mode:
    """One way to run a workload. `sequential`: each prompt starts when the previous one has finished."""

    params: SamplingParams
    sequential: bool = False


@dataclass(frozen=True)
class BenchRun:
    """The results of one run; `outputs` and `timings` are per sample, in the order of the prompts.

    Timings start when a request is due, so they include its time in the queue. `peak_blocks` is the largest number of
    cache blocks in use after a step. `draft_s` and `verify_s` are the times of drafting in all steps, and of target
    passes with the verdicts; `encode_s` is the encoder's time. `drafted` has for each output token whether it
    was drafted, `rejected` the draft tokens that were rejected in its place. `speculation` is the sum of `by_request`.
    """

    outputs: Sequence[Sequence[int]]
    timings: Sequence[TimingMetrics]
    speculation: SpeculationMetrics
    verifier: str | None  # None = no drafts
    seconds: float
    steps: int
    draft_s: float
    verify_s: float
    preemptions: int
    prefix_hit_tokens: int
    peak_blocks: int
    drafted: Sequence[Sequence[bool]] = ()
    rejected: Sequence[Sequence[tuple[int, ...]]] = ()
    by_request: Sequence[SpeculationMetrics] = ()
    encode_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return the reported figures by name; times in seconds. Figures that this run does not define are missing."""
        tokens = sum(len(output) for output in self.outputs)
        gaps = [gap for timing in self.timings for gap in timing.gaps]
        pauses = [pause for timing in self.timings for pause in timing.pauses]
        passes = sum(timing.sampled_passes for timing in self.timings)
        figures = {
            "seconds": self.seconds,
            "tokens": tokens,
            "tokens_per_s": tokens / self.seconds,
            "request_tokens_per_s": _median([t.tokens_per_s for t in self.timings if t.decode_s]),
            "ttft_s": _median([t.ttft_s for t in self.timings if t.ttft_s is not None]),
            "itl_mean_s": statistics.mean(gaps) if gaps else None,
            **{f"itl_p{q}_s": percentile(gaps, q) for q in (50, 90, 99)},
            **{f"burst_p{q}_s": percentile(pauses, q) for q in (50, 90, 99)},
            "burst_tokens": len(gaps) / len(pauses) if pauses else None,
            "steps": self.steps,
            "encode_s": self.encode_s or None,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "tokens_per_step": tokens / self.steps,
            "tokens_per_pass": tokens / passes if passes else None,
            "mean_acceptance_length": self.speculation.mean_acceptance_length,
            "acceptance_rate": self.speculation.acceptance_rate if self.speculation.num_spec_steps else None,
            "preemptions": self.preemptions,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "peak_blocks": self.peak_blocks,
        }
        return {name: value for name, value in figures.items() if value is not None}


class Bench:
    """Runs workloads on an engine that serves no other requests.

    Each run has a cache salt of its own that begins with `salt`. So its prompts share prefixes with one another and
    nothing with other runs of the engine: no drafts are looked up in the texts of other runs.
    """

    def __init__(self, runtime: Runtime, salt: str = "run") -> None:
        self.runtime, self._salt = runtime, salt
        runtime.engine.measurement.finish()  # so that no run measures costs

    def run(self, workload: Workload, mode: Mode) -> BenchRun:
        """Run every prompt to its end; the first error of a request is raised."""
        metrics = self.runtime.engine.metrics
        before, started = replace(metrics), time.perf_counter()
        delivery = _Delivery(self.runtime, mode, f"{self._salt}-{uuid.uuid4().hex}", started)
        try:
            delivery.serve(workload)
        finally:
            delivery.stop()
        seconds, requests = time.perf_counter() - started, delivery.requests
        committed = [delivery.committed[_key(request)] for request in requests]
        for request in requests:
            delivery.timings[_key(request)].share_passes(request.metrics.timing)
        by_request = [request.metrics.speculative_decoding for request in requests]
        return BenchRun(
            outputs=[request.output for request in requests],
            timings=[delivery.timings[_key(request)] for request in requests],
            speculation=SpeculationMetrics.total(by_request),
            verifier=requests[0].metrics.verification,
            seconds=seconds,
            steps=metrics.steps - before.steps,
            draft_s=metrics.draft_s - before.draft_s,
            verify_s=metrics.verify_s - before.verify_s,
            preemptions=metrics.preemptions - before.preemptions,
            prefix_hit_tokens=metrics.prefix_hit_tokens - before.prefix_hit_tokens,
            peak_blocks=delivery.peak_blocks,
            drafted=[[output.drafted for output in outputs] for outputs in committed],
            rejected=[[output.rejected for output in outputs] for outputs in committed],
            by_request=by_request,
            encode_s=metrics.encode_s - before.encode_s,
        )

    def warm_up(self, workload: Workload, mode: Mode) -> None:
        """Run the first prompt, for a few tokens."""
        tokens = min(WARM_UP_TOKENS, mode.params.max_tokens or WARM_UP_TOKENS)
        self.run(workload.first(1), replace(mode, params=replace(mode.params, max_tokens=tokens, min_tokens=0)))


class _Delivery:
    """Adds prompts to the engine when they are due, and records the time of each token."""

    def __init__(self, runtime: Runtime, mode: Mode, cache_salt: str, started: float) -> None:
        words = banned_tokens(mode.params.bad_words, runtime.tokenizer.encode)
        self._mode = replace(mode, params=replace(mode.params, bad_words=words)) if words else mode
        self._runtime, self._salt, self._started = runtime, cache_salt, started
        self._engine = runtime.engine
        self.requests: list[Request] = []
        self.timings: dict[tuple[str, int], TimingMetrics] = {}
        self.committed: dict[tuple[str, int], list[StepOutput]] = {}
        self.peak_blocks = 0

    def serve(self, workload: Workload) -> None:
        pending = deque(zip(workload.prompts, workload.arrivals or [0.0] * len(workload.prompts), strict=True))
        while pending or self._engine.has_unfinished():
            while pending and self._may_start(pending[0][1]):
                self._start(*pending.popleft())
            if self._engine.has_unfinished():
                self._record(self._engine.step())
            elif pending:
                time.sleep(max(0.0, self._started + pending[0][1] - time.perf_counter()))
        for request in self.requests:
            if request.ending.error is not None:
                raise request.ending.error

    def stop(self) -> None:
        for request in self.requests:
            if not request.finished:
                self._engine.abort(request.request_id)

    def _may_start(self, due: float) -> bool:
        if time.perf_counter() < self._started + due:
            return False
        if not self._engine.has_unfinished():
            return True
        return not self._mode.sequential and self._engine.accepts(self._mode.params.n)

    def _start(self, prompt: Sequence[int], due: float) -> None:
        arrival = time.perf_counter() if self._mode.sequential else self._started + due
        params, tokenizer = self._mode.params, self._runtime.tokenizer
        decoded, source = self._runtime.prompt_and_source(prompt)
        request_id = f"{self._salt}-{len(self.requests)}"
        checker = partial(TextStream, tokenizer, params, compile_stops(params.stop))
        added = self._engine.add_request(
            decoded, params, request_id, stop_checker=checker, cache_salt=self._salt, source=source
        )
        self.requests += added
        self.timings.update({_key(request): TimingMetrics(arrival) for request in added})
        self.committed.update({_key(request): [] for request in added})

    def _record(self, outputs: Sequence[StepOutput]) -> None:
        now = time.perf_counter()
        self.peak_blocks = max(self.peak_blocks, self._engine.metrics.blocks_used)
        tokens = [output for output in outputs if output.token is not None]
        for output in tokens:
            self.committed[output.request_id, output.index].append(output)
        counts = Counter((output.request_id, output.index) for output in tokens)
        for key, count in counts.items():
            self.timings[key].record_tokens(now, count)


def _key(request: Request) -> tuple[str, int]:
    return request.request_id, request.index


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


K = TypeVar("K")
T = TypeVar("T")
Notify = Callable[[str], None]  # called with the name of each run before it starts
Tell = Callable[[str], None]  # called with a line about the results so far

PLAIN, SPECULATIVE = "plain", "speculative"
ONE_AT_A_TIME = "_sequential"  # suffix of a mode's name


@dataclass(frozen=True)
class Spread:
    """The quartiles of a figure over the rounds."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Way:
    """A mode, and the engine that runs it; several ways may share one `Bench`."""

    bench: Bench
    mode: Mode


@dataclass(frozen=True)
class BenchCase:
    """A workload and its runs by mode (the name of a `Way`), one per round.

    The others are compared with the first mode. `params` are those of the speculative mode if there is one.
    """

    workload: Workload
    params: SamplingParams
    runs: Mapping[str, Sequence[BenchRun]]

    @property
    def comparable(self) -> bool:
        """Whether all modes must give the same tokens: greedy and seeded ones do."""
        return self.params.greedy or self.params.seed is not None

    @property
    def num_rounds(self) -> int:
        """How often each mode has run."""
        return len(next(iter(self.runs.values())))

    @property
    def compared(self) -> list[str]:
        """The modes that are compared with the first."""
        return list(self.runs)[1:]

    @property
    def num_outputs(self) -> int:
        """The number of outputs of one mode, over all rounds."""
        return sum(len(run.outputs) for run in next(iter(self.runs.values())))

    def num_identical(self, mode: str) -> int:
        """Count the outputs of a mode that have the same tokens as the first mode's of the same round."""
        first = next(iter(self.runs.values()))
        pairs = zip(
            itertools.chain(*(run.outputs for run in self.runs[mode])),
            itertools.chain(*(run.outputs for run in first)),
            strict=True,
        )
        return sum(mine == other for mine, other in pairs)

    def spreads(self, mode: str) -> dict[str, Spread]:
        """Return each figure's spread over the rounds."""
        return spreads([run.figures() for run in self.runs[mode]])

    def ratios(self, over: str, under: str) -> dict[str, Spread]:
        """Return the spread of each figure's ratio of two modes."""
        return ratios([run.figures() for run in self.runs[over]], [run.figures() for run in self.runs[under]])


def both_ways(params: SamplingParams, speculating: bool, sequential: bool = False) -> dict[str, Mode]:
    """Return the plain mode and, if there is a drafter, the speculative one, by name."""
    modes = {PLAIN: Mode(replace(params, speculation=False), sequential)}
    if speculating and params.speculation is not False:
        modes[SPECULATIVE] = Mode(params, sequential)
    return modes


def base_of(mode: str) -> str:
    """Return the plain mode with which a mode is compared: one at a time if the mode is."""
    return PLAIN + (ONE_AT_A_TIME if mode.endswith(ONE_AT_A_TIME) else "")


def ways_of(bench: Bench, modes: Mapping[str, Mode]) -> dict[str, Way]:
    """Return the modes of one engine as ways."""
    return {name: Way(bench, mode) for name, mode in modes.items()}


def one_at_a_time(modes: Mapping[str, Mode]) -> dict[str, Mode]:
    """Return the same modes with one prompt at a time."""
    return {name + ONE_AT_A_TIME: replace(mode, sequential=True) for name, mode in modes.items()}


def measure(
    ways: Mapping[str, Way], workload: Workload, rounds: int, notify: Notify, tell: Tell = lambda result: None
) -> BenchCase:
    """Run a workload in every way once per round, after a short warm-up run of each that does not count.

    tell: called with a line of the medians so far, after each round but the last.
    """
    for way in ways.values():
        way.bench.warm_up(workload, way.mode)
    params = ways.get(SPECULATIVE, ways[PLAIN]).mode.params
    subjects = {name: partial(way.bench.run, workload, way.mode) for name, way in ways.items()}

    def end_round(runs: Mapping[str, Sequence[BenchRun]]) -> None:
        case = BenchCase(workload, params, runs)
        if case.num_rounds < rounds:
            tell(f"after {case.num_rounds} of {rounds} rounds: {medians(case)}")

    return BenchCase(workload, params, interleave(subjects, rounds, notify, end_round))


def medians(case: BenchCase) -> str:
    """Return the speed of the first mode and those of the others over it, in one line."""
    first = next(iter(case.runs))
    parts = [f"{first} {case.spreads(first)['tokens_per_s'].median:,.0f} tokens/s"]
    speeds = {mode: case.ratios(base_of(mode), mode).get("itl_mean_s") for mode in case.compared}
    parts += [f"{mode} {speed.median:.2f} times its speed" for mode, speed in speeds.items() if speed is not None]
    return ", ".join(parts)


def interleave(
    subjects: Mapping[K, Callable[[], T]],
    rounds: int,
    notify: Callable[[K], None] = lambda name: None,
    end_round: Callable[[Mapping[K, Sequence[T]]], None] = lambda results: None,
) -> dict[K, list[T]]:
    """Run every subject once per round and return the results by subject.

    So noise of the machine affects all of them alike. Every other round runs backwards, so none is always first.
    end_round: called with the results so far after each round.
    """
    results: dict[K, list[T]] = {name: [] for name in subjects}
    for round_ in range(rounds):
        for name in list(subjects)[:: -1 if round_ % 2 else 1]:
            notify(name)
            results[name].append(subjects[name]())
        end_round(results)
    return results


def spreads(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return each figure's spread over the rounds; a figure that is missing in a round is left out."""
    return {name: Spread.of([each[name] for each in rounds]) for name in _shared(rounds)}


def ratios(over: Sequence[Mapping[str, float]], under: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Return the spread of over / under, taken per round; a figure that is 0 in `under` is left out."""
    return {
        name: Spread.of([above[name] / below[name] for above, below in zip(over, under, strict=True)])
        for name in _shared([*over, *under])
        if all(below[name] for below in under)
    }


def _shared(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in rounds[0] if all(name in each for each in rounds)]


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
    """Typical times of steps in seconds by draft length; `lengths` ascend from 0, the step of plain decoding.

    spread: the median step over the fastest one, for all lengths together; 1 = no other program disturbed them.
    """

    lengths: Sequence[int]
    draft_s: Sequence[float]
    other_s: Sequence[float]
    spread: float = 1.0

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
    """Return the lower quartiles of the times by length, over all rounds, and at most as much as a longer draft takes.

    Other programs only add to times. On a busy machine they disturb about half of the steps, so medians would jump from
    one length to the next. Quartiles jump too, if they disturb more.
    """
    steps = [list(itertools.chain(*rounds)) for rounds in times]
    return LengthCosts(
        lengths,
        _rising([Spread.of([step.draft_s for step in own]).q1 for own in steps]),
        _rising([Spread.of([step.other_s for step in own]).q1 for own in steps]),
        _spread([[step.draft_s + step.other_s for step in own] for own in steps]),
    )


def _spread(times: Sequence[Sequence[float]]) -> float:
    """Return the median time of every kind over the least, for all kinds together."""
    return sum(map(statistics.median, times)) / max(sum(map(min, times)), 1e-9)


def _rising(seconds: Sequence[float]) -> list[float]:
    """Return times of which none is above a later one."""
    return list(itertools.accumulate(reversed(seconds), min))[::-1]


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


def oracle_seconds(acceptance: NDArray[np.float64], costs: LengthCosts, longest: int, batch: int = 1) -> float:
    """Return the least expected time to commit a text by drafts of at most `longest` tokens.

    acceptance [T]: the probability that a token drafted there is accepted, if those before it in its draft are. The
    oracle knows these and the costs; each step's length is the best one for the rest of the text. 1 and 0 are known
    outcomes. batch: sequences that step together in `costs`; the text is charged its share of steps in which all draft
    as much as it does. The draft passes of a batch last as long as its longest draft, so no real oracle reaches that.
    """
    steps = np.interp(np.arange(longest + 1), costs.lengths, costs.total_s) / batch
    least = np.zeros(len(acceptance) + 1)
    for start in reversed(range(len(acceptance))):
        reached = np.cumprod(acceptance[start : min(start + longest, len(acceptance) - 1)])
        saved = np.cumsum(reached * np.diff(least[start + 1 : start + len(reached) + 2]))  # at most 0, by length
        least[start] = least[start + 1] + min(steps[: len(reached) + 1] + np.concatenate([np.zeros(1), saved]))
    return float(least[0])


BINS, FEWEST = 10, 32  # of a calibration; tokens of a bin


def calibrated(confidence: NDArray[np.float64], accepted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each token the share of accepted ones among the tokens of about its confidence.

    confidence, accepted [T]: the draft's probability of the token, and 1 or 0. Bins hold about equally many tokens.
    """
    bins = max(1, min(BINS, len(confidence) // FEWEST))
    edges = np.quantile(confidence, np.linspace(0, 1, bins + 1)[1:-1])
    places = np.searchsorted(edges, confidence, side="right")
    shares: NDArray[np.float64] = (np.bincount(places, accepted) / np.maximum(np.bincount(places), 1))[places]
    return shares
