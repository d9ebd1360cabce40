"""Whether the drafts of any method pay for a target: their acceptance is measured by drafting, at several sizes.

`pair.py` compares a draft model's distributions with the target's along texts. Heads, lookups and trees have no such
distributions, so the prompts are run once with each of several numbers of draft nodes. Several variants of a method are
compared: types of a head's weights, and values of options that the method's module names in `alternatives`.

`measure_sizes` finds how many tokens a draft's short output head should keep (arXiv 2502.14856). A head of n tokens
draws from the draft's own distribution, renormalised over these tokens, so the acceptance of all sizes is computed from
the same drafts of the whole head. The time of a draft is measured with a head of each size.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant import plugins
from speculant.cache import slotted_cache
from speculant.config import EngineConfig
from speculant.drafting import FILE, KEY, Drafter, Method, method_facts, save_head_tokens
from speculant.engine import (
    LEAST_GAIN,
    ROOM,
    UNCHANGED,
    DraftSample,
    Precision,
    build_around,
    build_drafters,
    load_target,
    load_tokenizer,
    method_name,
    pass_seconds,
)
from speculant.errors import ConfigError, RequestError
from speculant.lab.bench.measuring import Bench, LengthCosts, Mode, Notify, measure_steps
from speculant.lab.bench.pair import (
    FEWEST_TOKENS,
    LONGEST,
    NUM_PROMPTS,
    Array,
    Candidate,
    Estimate,
    Findings,
    Model,
    SpeedPrediction,
    measure_speed,
    pooled,
)
from speculant.lab.bench.workloads import Workload, WorkloadConfig, make_workload, require_room
from speculant.metrics import TimingMetrics
from speculant.models import Checkpoint, HeadHost
from speculant.params import SamplingParams

SIZES = (1, 2, 3, 4, 6, 8, LONGEST)  # nodes of the drafts whose acceptance and costs are measured
RUN_SECONDS, _COST_SECONDS = 20.0, 4.0
FEWEST_PROMPTS = 2


def check_drafts(config: EngineConfig, prompts: WorkloadConfig, params: SamplingParams, notify: Notify) -> Findings:
    """Load a target and the method that `config` names, measure its drafts and predict their speed.

    The engine's limits are replaced by those of one sequence. Raises ModelError, PairError, ConfigError or RequestError
    if a part can't be loaded or run, and RequestError if nothing is drafted.
    """
    require_lengths(config)
    params = replace(params, min_tokens=FEWEST_TOKENS)
    notify("Loading the models")
    target = load_target(config)
    variants = variants_of(config, target)
    candidates = {name: load_drafter(config, target, each) for name, each in variants.items()}
    first = next(iter(candidates.values()))
    workload = make_workload(prompts, first.runtime, NUM_PROMPTS)
    require_room(workload, params.max_tokens or 1, first.runtime.limits)
    notify("Generating texts with the target")
    part, seconds = _affordable(first, workload, params, RUN_SECONDS / len(candidates))
    notify("Measuring acceptance")
    drafts = {name: measure_drafts(each, part, params) for name, each in candidates.items()}
    notify("Measuring the cost of steps")
    lengths = {name: (0, *sizes) for name, (sizes, _, _) in drafts.items()}
    runtimes = {name: each.runtime for name, each in candidates.items()}
    costs = measure_steps(lengths, runtimes, part.prompts[0], params, _COST_SECONDS)
    predictions = {name: predict_drafts(*drafts[name], costs[name]) for name in candidates}
    notify("Measuring speed")
    chosen = max(predictions, key=lambda name: float(predictions[name].speeds[1:].max()))
    best = predictions[chosen].best_draft
    predicted = float(predictions[chosen].speeds[best])
    case = measure_speed(runtimes[chosen], part, params, best, seconds, predicted)
    return Findings(
        Model.of(target), _described(config, target), params, len(part.prompts), predictions, chosen, best, case,
        predicted, options=variants[chosen].options,
    )  # fmt: skip


def require_lengths(config: EngineConfig) -> None:
    """Raise ConfigError for a method whose drafts have no fixed length, so that none can be recommended."""
    speculative = config.speculative()
    assert speculative is not None, "a method is named"
    method = str(speculative.method)
    facts: Method = plugins.load("speculant.drafting", method).METHOD
    if facts.varies:
        raise ConfigError(
            f"drafts of {method!r} are as long as the text that it finds, so no length can be recommended",
            f"compare it with plain decoding: `speculant bench compare {config.model} --method {method}`.",
        )


@dataclass(frozen=True)
class Variant:
    """One of several variants of a method: options of the method, and the type of its head; None = the target's."""

    options: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None


def variants_of(config: EngineConfig, target: Checkpoint) -> dict[str, Variant]:
    """Return the variants to compare, by the name in the report."""
    plugin = plugins.load("speculant.drafting", str((config.speculative_config or {})["method"]))
    if hasattr(plugin, "alternatives"):
        found: list[dict[str, Any]] = plugin.alternatives(target.model)
        return {", ".join(f"{key} {value}" for key, value in each.items()): Variant(each) for each in found}
    facts: Method = plugin.METHOD
    host = target.model
    types = host.head_quantizations if facts.uses_head and isinstance(host, HeadHost) else ()
    return {UNCHANGED: Variant(), **{each: Variant(quantization=each) for each in types}}


def load_drafter(config: EngineConfig, target: Checkpoint, variant: Variant) -> Candidate:
    """Load the drafter for one sequence, with drafts of a fixed length."""
    speculative = {**(config.speculative_config or {}), "draft_length": "fixed", **variant.options}
    config = replace(config, max_num_seqs=1, speculative_config=speculative)
    if method_facts(str(speculative["method"])).uses_head:
        config = replace(config, draft_quantization=variant.quantization)
    return Candidate(variant.quantization, target, build_around(config, target))


def measure_drafts(
    candidate: Candidate, workload: Workload, params: SamplingParams
) -> tuple[list[int], Array, Estimate]:
    """Draft for all prompts with each number of nodes that the method can draft.

    Returns these numbers in ascending order, the tokens per pass with each of them [n], and accepted over tested tokens
    with the largest. The pass over the prompt is not counted.
    """
    bench, tokens, alpha, longest = Bench(candidate.runtime), dict[int, float](), None, LONGEST
    for size in sorted(SIZES, reverse=True):
        if size > longest or size in tokens:
            continue
        speculative = replace(params, speculation={"num_speculative_tokens": size})
        run = bench.run(workload, Mode(speculative, sequential=True))
        if alpha is None:
            longest, alpha = max(run.speculation.per_step_drafted, default=0), pooled(run.by_request)
        if min(size, longest) > 0:
            tokens[min(size, longest)] = _tokens_per_pass(run.timings)
    if alpha is None:
        raise RequestError("no token was drafted for these prompts", "give longer prompts, or another method.")
    sizes = sorted(tokens)
    return sizes, np.array([tokens[size] for size in sizes]), alpha


def _tokens_per_pass(timings: Sequence[TimingMetrics]) -> float:
    """Return the tokens per pass without the pass over the prompt and its token: the limit for long outputs."""
    passes = sum(each.sampled_passes - 1 for each in timings)
    return sum(each.num_tokens - 1 for each in timings) / max(1, passes)


def predict_drafts(sizes: Sequence[int], tokens: Array, alpha: Estimate, costs: LengthCosts) -> SpeedPrediction:
    """Predict the speed of drafts of 0 to max(sizes) nodes from tokens per pass [n] and costs at some sizes.

    One more node never gains more than the node before: a larger measured gain is chance.
    """
    lengths = np.arange(max(sizes) + 1)
    seen = np.interp(lengths, [0, *sizes], [1.0, *tokens.tolist()])
    gains = np.clip(np.minimum.accumulate(np.diff(seen)), 0.0, 1.0)
    per_pass = np.concatenate([[1.0], 1.0 + np.cumsum(gains)])
    times = [float(np.interp(length, costs.lengths, costs.total_s)) for length in lengths]
    speeds = per_pass * times[0] / np.array(times)
    reached = np.concatenate([[1.0], gains])
    rates = np.divide(gains, reached[:-1], out=np.zeros_like(gains), where=reached[:-1] > 0).tolist()
    ends = [0.0] if max(sizes) < LONGEST else []  # it drafts no more nodes
    return SpeedPrediction(alpha, costs, speeds, per_pass, None, [*rates, *ends])


def _affordable(
    candidate: Candidate, workload: Workload, params: SamplingParams, run_seconds: float
) -> tuple[Workload, list[float]]:
    """Return the prompts for which there is time, and the seconds that plain decoding takes for each."""
    bench, plain, seconds = Bench(candidate.runtime, "plain"), replace(params, speculation=False), list[float]()
    for prompt in workload.prompts:
        started = time.perf_counter()
        bench.run(replace(workload, prompts=[prompt], arrivals=()), Mode(plain, sequential=True))
        seconds.append(time.perf_counter() - started)
        if len(seconds) >= FEWEST_PROMPTS and sum(seconds) * len(SIZES) > run_seconds:
            break
    return workload.first(len(seconds)), seconds


def _described(config: EngineConfig, target: Checkpoint) -> Model:
    """Describe the drafter; its type is the target's."""
    speculative = config.speculative()
    assert speculative is not None, "a method is named"
    name = f"{speculative.method}, {speculative.model}" if speculative.model else str(speculative.method)
    own = Model.of(target)
    return replace(own, name=name, parameters=stored_parameters(speculative.model, str(speculative.method)))


def stored_parameters(source: str | None, method: str) -> int:
    """Return the weights in the files of a head or a model; 0 where there is none."""
    from math import prod

    from speculant.gguf_file import GgufFile
    from speculant.models import gguf_weights, open_file, resolve_source

    if source is None:
        return 0
    folder = resolve_source(source, f"heads/{method}") if source == "demo" else resolve_source(source)
    if folder.is_file():
        files = [gguf_weights(GgufFile.open(folder))]
    else:
        files = [open_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return sum(prod(each.shape(name)) for each in files for name in each.names())


HALVINGS = 6  # sizes below the whole vocabulary
FEWEST = 32  # tokens of a head
SECONDS = 30.0  # for comparing drafts along the texts; the first one is always read


@dataclass(frozen=True)
class HeadSize:
    """A head of `size` tokens. coverage: their share of the counted tokens. speed: expected tokens per second.

    acceptance, token_s, draft_s: see `Precision`.
    """

    size: int
    coverage: float
    acceptance: float
    token_s: float
    draft_s: float
    speed: float


def sizes_of(vocab_size: int, least: int) -> list[int]:
    """Return the sizes to compare, the whole vocabulary first: each is half of the one before, and at least `least`."""
    found = [vocab_size >> halvings for halvings in range(HALVINGS + 1)]
    return [size for size in found if size >= max(least, FEWEST)] or [vocab_size]


def best_size(found: Sequence[HeadSize]) -> HeadSize:
    """Return the fastest head, among sizes of which the first one is the whole vocabulary.

    A shorter head must gain LEAST_GAIN over the whole one.
    """
    best = max(found, key=lambda each: each.speed)
    return best if best.speed > (1 + LEAST_GAIN) * found[0].speed else found[0]


def overlaps(p: Tensor, q: Tensor, order: Tensor, sizes: Sequence[int]) -> list[float]:
    """Return sum min(p, q_n) for each size n: q_n is q [V], renormalised over the first n tokens of `order` [V].

    A q_n without a possible token drafts nothing.
    """
    p, q = p.double()[order], q.double()[order]
    found = list[float]()
    for size in sizes:
        total = float(q[:size].sum())
        found.append(float(torch.minimum(p[:size], q[:size] / total).sum()) if total > 0 else 0.0)
    return found


def measure_sizes(
    config: EngineConfig,
    counts: NDArray[np.int64],
    order: Sequence[int],
    least: int,
    texts: Sequence[Sequence[int]],
    notify: Callable[[str], None] = lambda part: None,
) -> list[HeadSize]:
    """Measure heads of several sizes, the whole vocabulary first.

    config: names target, draft and method. counts [V]: of each token. order: all tokens, the most useful first; `least`
    of them are always kept. texts: like the target's outputs, of at least two tokens each. Raises ConfigError if there
    is none, or if the draft's folder already names the tokens of its head.
    """
    usual = Path(str(config.draft_model)).expanduser() / FILE
    if usual.exists():
        raise ConfigError(f"{usual} limits the head that is to be measured", "move it to another folder.")
    notify("Loading the models")
    target = load_target(config)
    sizes = sizes_of(len(order), least)
    notify("Measuring acceptance")
    samples = [text[: target.model.max_positions] for text in texts]
    if not samples:
        raise ConfigError("the files hold no two tokens in a row", "name files with text.")
    acceptance, sample = _acceptance(config, target, samples, order, sizes)
    pass_s, found = pass_seconds(target.model, []), list[HeadSize]()
    for size, own in zip(sizes, acceptance, strict=True):
        notify(f"Timing a head of {size} tokens")
        with torch.inference_mode():
            drafter = _drafter(config, target, order[:size] if size < len(order) else (), len(sample.tokens))
            token_s, draft_s = sample.seconds(drafter, [])
        speed = Precision(None, own, token_s, draft_s).speed(pass_s)
        coverage = float(counts[np.array(order[:size])].sum() / counts.sum())
        found.append(HeadSize(size, coverage, own, token_s, draft_s, speed))
    return found


@torch.inference_mode()
def _acceptance(
    config: EngineConfig, target: Checkpoint, texts: Sequence[Sequence[int]], order: Sequence[int], sizes: Sequence[int]
) -> tuple[list[float], DraftSample]:
    """Return the mean overlap by size, and the first text."""
    longest = max(map(len, texts))
    drafter, ordered, rows = _drafter(config, target, (), longest), torch.tensor(order), list[list[float]]()
    first, started = DraftSample.of(target, texts[0]), time.perf_counter()
    for place, text in enumerate(texts):
        sample = DraftSample.of(target, text) if place else first
        for tree, probs in sample.drafts(drafter):
            if tree.size and tree.probs is not None:
                rows.append(overlaps(probs, tree.probs[0], ordered, sizes))
            else:
                rows.append([0.0] * len(sizes))
        if time.perf_counter() - started > SECONDS:
            break
    return np.mean(rows, axis=0).tolist(), first


def _drafter(config: EngineConfig, target: Checkpoint, tokens: Sequence[int], longest: int) -> Drafter:
    """Build the drafter with a head of these tokens, () = all, for texts of up to `longest` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        options = dict(config.speculative_config or {})
        if tokens:
            options[KEY] = str(Path(folder) / FILE)
            save_head_tokens(Path(options[KEY]), tokens)
        spec = replace(config, speculative_config={**options, "draft_length": "fixed"}).speculative()
        assert spec is not None, "a draft is named"
        tokenizer = load_tokenizer(config, target.folder)
        length = 4 * longest + ROOM  # a draft of another tokenizer may read more tokens
        drafters, _ = build_drafters(config, spec, target, tokenizer, lambda shape: slotted_cache(shape, 1, length))
        return drafters.find(method_name(spec))
