"""One run of a workload on an engine. A token's time is that of the `Engine.step` call that returns it."""

from __future__ import annotations

import statistics
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from speculant.engine.build import Runtime
from speculant.lab.bench.workloads import Workload
from speculant.metrics import SpeculationMetrics, TimingMetrics, percentile
from speculant.params import SamplingParams
from speculant.structured.vocabulary import banned_tokens
from speculant.text.stream import TextStream, compile_stops
from speculant.types import Request, StepOutput

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Mode:
    """One way to run a workload. `sequential`: each prompt starts when the one before has finished."""

    params: SamplingParams
    sequential: bool = False


@dataclass(frozen=True)
class BenchRun:
    """The results of one run; `outputs` and `timings` are per sample, in the order of the prompts.

    Timings start when a request is due, so they include its time in the queue. `peak_blocks` is the largest number of
    cache blocks in use after a step. `draft_s` and `verify_s` are the times of drafting in all steps, and of target
    passes with the verdicts; `encode_s` is that of the encoder's passes. `drafted` has for each output token whether it
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
        speculation = SpeculationMetrics()
        for request in requests:
            speculation.add(request.metrics.speculative_decoding)
        return BenchRun(
            outputs=[request.output for request in requests],
            timings=[delivery.timings[_key(request)] for request in requests],
            speculation=speculation,
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
            by_request=[request.metrics.speculative_decoding for request in requests],
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
        pending = deque(zip(workload.prompts, workload.arrivals, strict=True))
        while pending or self._engine.has_unfinished():
            while pending and self._may_start(pending[0][1]):
                self._start(*pending.popleft())
            if self._engine.has_unfinished():
                self._record(self._engine.step())
            elif pending:
                time.sleep(max(0.0, self._started + pending[0][1] - time.perf_counter()))
        for request in self.requests:
            if request.error is not None:
                raise request.error

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
