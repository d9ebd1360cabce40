"""Counters and timings of requests and of the engine, and the metrics that show an engine's. Nothing here prints."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # bounds of a histogram, vLLM's


@dataclass
class SpeculationMetrics:
    """Speculation counts of one request (docs/references.md, metrics).

    A draft is counted up to the token that ended the request. Accepted tokens are those that the request gained. Tokens
    after its end are neither accepted nor tested here, even if the verifier had accepted them. Drafted tokens are all
    that were proposed.
    `acceptance_histogram[k]` counts the steps in which exactly k draft tokens were accepted.
    """

    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_tested_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_tested: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, tested: int) -> None:
        """Count one verification of a draft of `drafted` > 0 nodes."""
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        self.num_tested_tokens += tested
        missing = accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        self.acceptance_histogram[accepted] += 1
        self.per_step_drafted.append(drafted)
        self.per_step_accepted.append(accepted)
        self.per_step_tested.append(tested)

    @classmethod
    def total(cls, parts: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
        """Return the pooled counts of several requests."""
        whole = cls()
        for part in parts:
            whole.add(part)
        return whole

    def add(self, other: SpeculationMetrics) -> None:
        """Pool another request's counts into these."""
        self.num_spec_steps += other.num_spec_steps
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_draft_tokens += other.num_accepted_draft_tokens
        self.num_tested_tokens += other.num_tested_tokens
        self.acceptance_histogram += [0] * (len(other.acceptance_histogram) - len(self.acceptance_histogram))
        for accepted, steps in enumerate(other.acceptance_histogram):
            self.acceptance_histogram[accepted] += steps
        self.per_step_drafted += other.per_step_drafted
        self.per_step_accepted += other.per_step_accepted
        self.per_step_tested += other.per_step_tested

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps that had a draft, vLLM's figure.

        It does not count tokens: steps without a draft are left out, and the 1 is also added for a step whose draft
        ended the request. `RequestMetrics.tokens_per_pass` counts tokens.
        """
        return 1 + _ratio(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted (docs/references.md, metrics): also counts tokens that were not tested."""
        return _ratio(self.num_accepted_draft_tokens, self.num_draft_tokens)

    @property
    def acceptance_rate(self) -> float:
        """Pooled alpha, accepted / tested (docs/references.md, metrics): tokens after a rejection are not tested."""
        return _ratio(self.num_accepted_draft_tokens, self.num_tested_tokens)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / tested by position in the draft, up to the last position that was tested."""
        accepted, tested = _reaching(self.per_step_accepted), _reaching(self.per_step_tested)
        return [one / other for one, other in zip([*accepted, *[0] * len(tested)], tested, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates under their documented keys; see `steps` for the lists that are left out."""
        rates = {name: getattr(self, name) for name in _RATES}
        counts = {name: value for name, value in asdict(self).items() if not name.startswith("per_step_")}
        return {**counts, **rates}

    def steps(self) -> dict[str, list[int]]:
        """Return what every step drafted and accepted, in order, under their documented keys."""
        return {name: list(getattr(self, name)) for name in _STEPS}


def _reaching(counts: Sequence[int]) -> list[int]:
    """Return how many of the counts are above 0, above 1, and so on."""
    return [sum(count > place for count in counts) for place in range(max(counts, default=0))]


_STEPS = ("per_step_accepted", "per_step_drafted")
_RATES = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_rate")


@dataclass
class StepTiming:
    """Times of a step's stages: readings of `time.perf_counter`, and the durations between them, in seconds.

    rest_s: to commit; 0 before the step has committed. passed: the end of the target's pass, before the verdicts; None
    = not measured. encoded: the end of the encoder's pass over new sources; None = there was none. draft_s: to propose
    drafts. verify_s: the target's pass and the verdicts; pass_s: the pass alone.
    """

    started: float
    drafted: float
    verified: float
    rest_s: float = 0.0
    passed: float | None = None
    encoded: float | None = None

    def __post_init__(self) -> None:
        first = self.started if self.encoded is None else self.encoded
        self.encode_s, self.draft_s = first - self.started, self.drafted - first
        self.verify_s = self.verified - self.drafted
        self.pass_s = self.verify_s if self.passed is None else self.passed - self.drafted


@dataclass(kw_only=True)
class StageTimes:
    """The times of steps by stage, in seconds.

    pass_s is the part of verify_s that the target's passes took. encode_s: the encoder's passes over any request's
    source, in the same steps.
    """

    encode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    pass_s: float = 0.0

    def count_stages(self, step: StepTiming) -> None:
        """Add the times of a step."""
        self.encode_s += step.encode_s
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.pass_s += step.pass_s

    def copy_stages(self, other: StageTimes) -> None:
        """Take over the times of others."""
        self.encode_s, self.draft_s = other.encode_s, other.draft_s
        self.verify_s, self.pass_s = other.verify_s, other.pass_s


@dataclass
class PassTotals(StageTimes):
    """The target passes that any sample of a prompt took part in, each counted once, and their steps' times."""

    passes: int = 0
    newest: float | None = None  # when the newest step started, which identifies it

    def record(self, step: StepTiming) -> None:
        """Count a step's pass, unless another sample did so already."""
        if step.started != self.newest:
            self.newest = step.started
            self.passes += 1
            self.count_stages(step)


@dataclass
class TimingMetrics(StageTimes):
    """Wall-clock figures of one sample, or of all samples of a request (`pooled`).

    Readings of `time.perf_counter` and durations, in seconds. started: when the first step that it took part in began.
    target_passes: passes that it took part in. sampled_passes: those that gave it tokens; passes that only process a
    part of the prompt are left out. A pass that serves k samples of a request adds 1 to its target_passes and k to its
    sampled_passes. together: the totals that the samples of one prompt share; None = it is the only one.
    """

    arrival: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    target_passes: int = 0
    sampled_passes: int = 0
    gaps: list[float] = field(default_factory=list)  # between one token and the next; 0 within a step
    together: PassTotals | None = None

    @classmethod
    def pooled(cls, samples: Sequence[TimingMetrics]) -> TimingMetrics:
        """Return the figures of all samples of a request: from the first token of any of them to the last of all."""
        first = samples[0]
        if len(samples) == 1:
            return first
        totals = first.together
        assert totals is not None, "the samples of a prompt count their passes together"
        starts = [each.started for each in samples if each.started is not None]
        firsts = [each.first_token for each in samples if each.first_token is not None]
        lasts = [each.last_token for each in samples if each.last_token is not None]
        whole = cls(
            first.arrival,
            min(starts, default=None),
            min(firsts, default=None),
            max(lasts, default=None),
            num_tokens=sum(each.num_tokens for each in samples),
            target_passes=totals.passes,
            sampled_passes=sum(each.sampled_passes for each in samples),
            gaps=[gap for each in samples for gap in each.gaps],
        )
        whole.copy_stages(totals)
        return whole

    def record_pass(self, step: StepTiming) -> None:
        """Count the target pass of a step that the sample took part in."""
        if self.started is None:
            self.started = step.started
        self.target_passes += 1
        self.count_stages(step)
        if self.together is not None:
            self.together.record(step)

    def share_passes(self, other: TimingMetrics) -> None:
        """Copy the passes of another sample and their times: both samples share their passes."""
        self.target_passes, self.sampled_passes = other.target_passes, other.sampled_passes
        self.copy_stages(other)
        self.started = other.started

    def record_tokens(self, now: float, n: int) -> None:
        """Count n > 0 tokens that were committed together."""
        if self.last_token is None:
            self.first_token = now
            self.gaps += [0.0] * (n - 1)
        else:
            self.gaps += [now - self.last_token] + [0.0] * (n - 1)
        self.last_token = now
        self.num_tokens += n

    @property
    def pauses(self) -> list[float]:
        """The times between one burst of tokens and the next; tokens of a step arrive together."""
        return [gap for gap in self.gaps if gap > 0]

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def queue_s(self) -> float | None:
        """Time until the first step that it took part in."""
        return None if self.started is None else self.started - self.arrival

    @property
    def prompt_s(self) -> float | None:
        """Time from the first step to the first token."""
        return None if self.started is None or self.first_token is None else self.first_token - self.started

    @property
    def decode_s(self) -> float:
        """Time from the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return 0.0
        return self.last_token - self.first_token

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first one, per second of decoding; of all samples together if they are pooled."""
        return _ratio(max(0, self.num_tokens - 1), self.decode_s)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass that sampled them: num_tokens / sampled_passes.

        1 without speculation. Of several samples it is the mean over their passes, and does not depend on the batch.
        """
        return _ratio(self.num_tokens, self.sampled_passes)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under their documented keys; times between tokens and between bursts as percentiles."""
        return {
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "tokens_per_s": self.tokens_per_s,
            "target_passes": self.target_passes,
            "sampled_passes": self.sampled_passes,
            "tokens_per_pass": self.tokens_per_pass,
            "encode_s": self.encode_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "itl_s": {f"p{q}": percentile(self.gaps, q) for q in (50, 90, 99)},
            "burst_s": {f"p{q}": percentile(self.pauses, q) for q in (50, 90, 99)},
        }


@dataclass
class RequestMetrics:
    """All figures of one sample, or of all samples of a request (`pooled`).

    verification: the verifier's name, "beam" for a beam search; None = no speculation.
    lossless: the output has the target's distribution; False only for a lenient verifier.
    cached_tokens: prompt tokens that were found in the cache, by the first sample if they are pooled.
    num_preemptions: how often it was preempted, for memory or for another client.
    """

    timing: TimingMetrics
    speculative_decoding: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    verification: str | None = None
    lossless: bool = True
    cached_tokens: int = 0
    num_preemptions: int = 0

    @classmethod
    def pooled(cls, samples: Sequence[RequestMetrics]) -> RequestMetrics:
        """Return the figures of all samples of a request; a single sample has its own."""
        if len(samples) == 1:
            return samples[0]
        speculation = SpeculationMetrics.total(each.speculative_decoding for each in samples)
        return replace(
            samples[0],
            timing=TimingMetrics.pooled([each.timing for each in samples]),
            speculative_decoding=speculation,
            num_preemptions=sum(each.num_preemptions for each in samples),
        )

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass that sampled them; see `TimingMetrics.tokens_per_pass`."""
        return self.timing.tokens_per_pass

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {
            "tokens_per_pass": self.tokens_per_pass,
            "speculative_decoding": {
                **self.speculative_decoding.to_dict(),
                "verification": self.verification,
                "lossless": self.lossless,
            },
            "timing": self.timing.to_dict(),
            "cached_tokens": self.cached_tokens,
            "num_preemptions": self.num_preemptions,
        }


@dataclass
class EngineMetrics:
    """An engine's totals since it was made, and its state after the last step.

    Requests are counted per sample. sampled_passes: target passes after which a sequence was given tokens, counted for
    each sequence; a beam search counts as its samples. encode_s, draft_s, verify_s and other_s divide the steps' time,
    in seconds. lossy samples were verified by a verifier that is not lossless. repeated_steps counts steps that failed
    and were repeated for each source and sequence alone; transient_errors counts the repeated steps that
    then succeeded for every one. drafts were verified, with draft_tokens nodes, of which accepted_tokens were kept;
    accepted_per_position[d] is how many at depth d, the root's children being at 0.
    drafter_errors counts calls of a drafter that raised, and drafts that broke its contract; none of them fails a
    request. Of the prompt tokens of ended requests, prefix_hit_tokens were found in the cache. The tokens of a source
    are prompt tokens too. disk_hit_tokens were read from the prompt cache on disk. prepared_tokens were computed ahead
    of requests, and prepared_tokens_used of these were then found by one. Blocks belong to the target's cache and have
    block_size positions. evicted_until: see `BlockPool`. computed_tokens: prompt tokens computed and tokens generated;
    step_tokens[k] counts the steps with at most STEP_TOKENS[k] and more than STEP_TOKENS[k - 1] of these tokens, and
    its last entry the steps with more than any bound.
    """

    steps: int = 0
    tokens: int = 0
    sampled_passes: int = 0
    encode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    lossy: int = 0
    repeated_steps: int = 0
    transient_errors: int = 0
    drafter_errors: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    prepared_tokens: int = 0
    prepared_tokens_used: int = 0
    waiting: int = 0
    running: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    block_size: int = 0
    evicted_until: float = 0.0
    computed_tokens: int = 0
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)

    def count_step(self, tokens: int) -> None:
        """Count a step with this many prompt tokens computed and tokens generated."""
        place, counts = bisect_left(STEP_TOKENS, tokens), self.step_tokens
        self.steps += 1
        self.computed_tokens += tokens
        self.step_tokens = (*counts[:place], counts[place] + 1, *counts[place + 1 :])

    def count_times(self, seconds: float, timings: Iterable[StepTiming]) -> None:
        """Count the seconds of a step; timings: of its passes."""
        self.other_s += seconds
        for timing in timings:
            self.encode_s += timing.encode_s
            self.draft_s += timing.draft_s
            self.verify_s += timing.verify_s
            self.other_s -= timing.encode_s + timing.draft_s + timing.verify_s

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` > 0 nodes, of which a path of `accepted` nodes was accepted."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        counts = [*self.accepted_per_position, *(0,) * (accepted - len(self.accepted_per_position))]
        for depth in range(accepted):
            counts[depth] += 1
        self.accepted_per_position = tuple(counts)

    @property
    def blocks_share(self) -> float:
        """The share of the cache's blocks that are in use, 1 = all."""
        return _ratio(self.blocks_used, self.blocks_total)

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per step, of all sequences of the batch together."""
        return _ratio(self.tokens, self.steps)

    @property
    def tokens_per_pass(self) -> float:
        """Committed tokens per sequence and pass that sampled them; see `TimingMetrics.tokens_per_pass`."""
        return _ratio(self.tokens, self.sampled_passes)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values for JSON."""
        return {**asdict(self), "tokens_per_step": self.tokens_per_step, "tokens_per_pass": self.tokens_per_pass}


@dataclass(frozen=True)
class Metric:
    """A metric that was read. labels: model_name and others."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A total that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Totals by place: accepted draft tokens at each position of a draft."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """How many observations do not exceed each bound of `buckets`, "+Inf" among them; their number and sum.

    An engine measures none; a server does, because requests arrive and end there.
    """

    count: int
    sum: float
    buckets: dict[str, int]


Kind = type[Counter] | type[Gauge] | type[Vector]


class EngineFigure(NamedTuple):
    """A metric of an engine's totals. field: of `EngineMetrics`. name: vLLM's, where vLLM has it.

    vllm: "engine" = vLLM's servers have it, and its engine's `get_metrics`; "server" = its servers only; "" = neither.
    """

    name: str
    field: str
    kind: Kind
    vllm: str
    text: str


_PASSES = (
    "Target passes that gave a sequence tokens, per sequence; generation_tokens over these is the tokens per pass."
)
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_FIGURES: tuple[tuple[str, str, Kind, str, str], ...] = (
    ("prompt_tokens", "prompt_tokens", Counter, "engine", "Tokens of the prompts of ended requests."),
    (
        "prompt_tokens_cached",
        "prefix_hit_tokens",
        Counter,
        "server",
        "Those of them that were found in the prefix cache.",
    ),
    ("generation_tokens", "tokens", Counter, "engine", "Tokens generated."),
    ("generation_passes", "sampled_passes", Counter, "", _PASSES),
    ("num_preemptions", "preemptions", Counter, "engine", "Sequences preempted, for memory or for another client."),
    ("prefix_cache_queries", "prompt_tokens", Counter, "engine", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hit_tokens", Counter, "engine", "Prompt tokens found in the prefix cache."),
    ("external_prefix_cache_hits", "disk_hit_tokens", Counter, "engine", "Tokens read from the prompt cache on disk."),
    ("gpu_prefix_cache_queries", "prompt_tokens", Counter, "server", "prefix_cache_queries under its older name."),
    ("gpu_prefix_cache_hits", "prefix_hit_tokens", Counter, "server", "prefix_cache_hits under its older name."),
    ("spec_decode_num_drafts", "drafts", Counter, "engine", "Drafts verified."),
    ("spec_decode_num_draft_tokens", "draft_tokens", Counter, "engine", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", Counter, "engine", "Draft tokens accepted."),
    ("prepared_tokens", "prepared_tokens", Counter, "", "Prompt tokens computed ahead of a request."),
    ("prepared_tokens_used", "prepared_tokens_used", Counter, "", "Those of them that a request then began with."),
    ("num_requests_running", "running", Gauge, "engine", "Sequences that run."),
    ("num_requests_waiting", "waiting", Gauge, "engine", "Sequences that wait for their first step, or for memory."),
    ("kv_cache_usage_perc", "blocks_share", Gauge, "engine", "Share of the cache in use, 1 = all."),
    ("gpu_cache_usage_perc", "blocks_share", Gauge, "server", "The same under its older name."),
    (_PER_POSITION, "accepted_per_position", Vector, "engine", "Draft tokens accepted at each position."),
)
ENGINE_FIGURES = tuple(EngineFigure(*row) for row in _FIGURES)
_STATE = ("waiting", "running", "blocks_used", "blocks_total", "block_size")  # fields that are no totals


def read_metrics(totals: EngineMetrics, model: str) -> list[Metric]:
    """Return the totals under vLLM's names ("vllm:prompt_tokens"), then each under its own ("speculant:steps")."""
    labels = {"model_name": model}
    shown = [each for each in ENGINE_FIGURES if each.vllm == "engine"]
    found = [_metric(f"vllm:{each.name}", labels, each.kind, getattr(totals, each.field)) for each in shown]
    return found + [
        _metric(f"speculant:{name}", labels, _kind(name, value), value) for name, value in totals.to_dict().items()
    ]


def _kind(name: str, value: Any) -> Kind:
    return Vector if isinstance(value, tuple) else Gauge if isinstance(value, float) or name in _STATE else Counter


def _metric(name: str, labels: dict[str, str], kind: Kind, value: Any) -> Metric:
    if kind is Vector:
        return Vector(name, labels, list(value))
    return Gauge(name, labels, float(value)) if kind is Gauge else Counter(name, labels, int(value))


def percentile(values: Sequence[float], q: int) -> float | None:
    """Return the q-th percentile by the nearest rank; None when there are no values."""
    if not values:
        return None
    rank = max(1, -(-len(values) * q // 100))  # of the first value that at least q percent of n values do not exceed
    return sorted(values)[rank - 1]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
