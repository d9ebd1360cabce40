"""Whether a draft pays for a target on this machine: acceptance, costs, predicted and measured speed.

The acceptance of a draft model's tokens is that along texts that the target writes: each model reads them in one pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculant import plugins
from speculant.cache import MEASURED, Source, slotted_cache
from speculant.config import EngineConfig
from speculant.drafting import fit_vocabulary
from speculant.engine import UNCHANGED, Runtime, build_around, draft_vocabulary, load_target
from speculant.kernels import Sampler
from speculant.lab.bench.measuring import (
    PLAIN,
    SPECULATIVE,
    Bench,
    BenchCase,
    LengthCosts,
    Mode,
    Notify,
    Spread,
    both_ways,
    measure,
    measure_steps,
    ways_of,
)
from speculant.lab.bench.workloads import Workload, WorkloadConfig, make_workload, require_room
from speculant.lab.theory import acceptance, best_length, correlation_of, expected_costs
from speculant.metrics import SpeculationMetrics
from speculant.models import (
    CausalLM,
    Checkpoint,
    DecoderConfig,
    MappedVocabulary,
    SequenceInput,
    TargetVocabulary,
    build_batch,
    encode_sources,
    known,
    load_model,
    parameters,
    resolve_source,
    values_per_position,
)
from speculant.params import SamplingParams
from speculant.sampling import sampling_settings
from speculant.types import DraftTree

Array = NDArray[np.float64]
Split = Callable[[Sequence[int]], list[list[int]]]

CHUNK = 512  # rows per pass
BLOCK = 16  # tokens that count as one observation: the acceptance of neighbours is correlated
MANY = 16  # texts whose own variance is known well enough
NORMAL = 1.959964  # the quantile of a two-sided 95% interval
NOTHING = 1e-12  # a variance below this is rounding


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output, as token ids. source: of an encoder-decoder model."""

    prompt: Sequence[int]
    output: Sequence[int]
    source: Sequence[int] = ()


@dataclass(frozen=True)
class TextAcceptance:
    """Acceptance of a draft model along one text of T output tokens.

    overlap [T]: sum over the vocabulary of min(p, q), the probability that a drafted token is accepted there
    (`lab.theory.acceptance`). given [T]: min(1, q / p) at the output token (`lab/theory/speedup.py`).
    """

    overlap: Array
    given: Array


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens, with a 95% confidence interval."""

    mean: float
    low: float
    high: float
    tokens: int


class TextReader:
    """A model that reads whole texts and returns the distributions of their output tokens.

    split: returns the ids that the model reads for each token of a text, at least one; None = the token itself.
    """

    def __init__(self, model: CausalLM, sampler: Sampler, vocab_size: int, split: Split | None = None) -> None:
        self._model, self._sampler, self._vocab_size = model, sampler, vocab_size
        self._split = split or (lambda tokens: [[token] for token in tokens])

    def distributions(self, text: Text, params: SamplingParams) -> Tensor:
        """Return probs [T, V] of the output's tokens, by temperature, top-k, top-p and min-p alone."""
        logits = self.logits(text)
        settings = [sampling_settings(params)] * len(logits)
        return self._sampler.distribution(fit_vocabulary(logits, self._vocab_size), settings, [None] * len(logits))

    @torch.inference_mode()
    def logits(self, text: Text) -> Tensor:
        """Return the model's logits of the output's tokens, [T, rows of its head]."""
        read = self._split([*text.prompt, *text.output[:-1]])
        last = list(accumulate(map(len, read)))  # one more than the row of each token's last id
        states = read_text(self._model, self._known(read), self._known(self._split(text.source) if text.source else []))
        return self._model.logits(states[[row - 1 for row in last[len(text.prompt) - 1 :]]])

    def confidence(self, text: Text) -> Array:
        """Return the model's probability of its likeliest token at each of the output's, at temperature 1."""
        logits = fit_vocabulary(self.logits(text), self._vocab_size)
        found: Array = logits.float().softmax(-1).amax(-1).cpu().double().numpy()
        return found

    def _known(self, read: Sequence[Sequence[int]]) -> Sequence[int]:
        return known([each for ids in read for each in ids], self._model.vocab_size)


@torch.inference_mode()
def read_text(model: CausalLM, tokens: Sequence[int], source: Sequence[int] = ()) -> Tensor:
    """Return a model's hidden states of a text, [tokens, hidden]: the inputs of its `logits`.

    source: what the encoder of an encoder-decoder model reads; other models ignore it.
    """
    encoded = Source(MEASURED, tuple(source)) if model.needs.source else None
    cache = slotted_cache(model.cache_shape, 1 if encoded is None else 2, max(len(tokens), len(source)))
    if encoded is not None:
        encode_sources(model, cache, [encoded])
    hidden, name = [], None if encoded is None else encoded.seq_id
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        rows = SequenceInput(1, part, DraftTree.empty(), length=len(tokens), source=name)
        hidden.append(model.forward(build_batch([rows], cache, model.cache_shape.device), cache.storage).last)
    return torch.cat(hidden)


def measure_acceptance(
    target: TextReader, draft: TextReader, texts: Sequence[Text], params: SamplingParams
) -> list[TextAcceptance]:
    """Return the acceptance along each text, without its first token, which comes with the prompt."""
    found = list[TextAcceptance]()
    for text in texts:
        whole = compare_probs(target.distributions(text, params), draft.distributions(text, params), text.output)
        found.append(TextAcceptance(whole.overlap[1:], whole.given[1:]))
    return found


def compare_probs(p: Tensor, q: Tensor, output: Sequence[int]) -> TextAcceptance:
    """Compare the target's probs p [T, V] and the draft model's q [T, V] at the output tokens [T].

    This pass may decide a near-tie otherwise, so that p excludes an output token; such a token counts as accepted with
    probability q.
    """
    chosen = torch.tensor(output, device=p.device)[:, None]
    own, drafted = p.gather(1, chosen)[:, 0], q.gather(1, chosen)[:, 0]
    given = torch.where(own > 0, drafted / own, drafted).clamp(max=1.0)
    return TextAcceptance(acceptance(p.cpu().numpy(), q.cpu().numpy()), given.cpu().numpy())


def pooled(requests: Sequence[SpeculationMetrics]) -> Estimate | None:
    """Return accepted / tested over all steps of requests (docs/references.md, metrics); None if nothing was tested.

    Under `rejection` it estimates the same alpha as the mean overlap along texts that the target writes (arXiv
    2211.17192, section 4.2). `block` and trees accept more.
    """
    texts = [_tests(each) for each in requests]
    return estimate(texts) if any(map(len, texts)) else None


def _tests(metrics: SpeculationMetrics) -> Array:
    """Return 1 for each accepted token and 0 for each rejected one, in order."""
    steps = zip(metrics.per_step_accepted, metrics.per_step_tested, strict=True)
    return np.array([float(place < accepted) for accepted, tested in steps for place in range(tested)])


def estimate(values: Sequence[Array]) -> Estimate:
    """Return the mean over the tokens of all texts, with Wilson's interval.

    The interval uses the effective number of observations: the number of independent tokens for which the means of
    blocks would have the observed variance. If all blocks are alike, each counts once. With MANY texts, each
    text is a block, as some are easier than others from end to end, for example one that repeats itself.
    """
    texts = [text for text in values if len(text)]
    parts = [np.array_split(text, max(1, len(text) // BLOCK)) for text in texts]
    blocks = texts if len(texts) >= MANY else [part for text in parts for part in text]
    tokens = sum(len(block) for block in blocks)
    mean = sum(float(block.sum()) for block in blocks) / tokens
    free = max(1, len(blocks) - 1)
    variance = sum(float((block - mean).sum()) ** 2 for block in blocks) / tokens**2 * len(blocks) / free
    alone = max(0.0, mean * (1 - mean))  # the variance of one token
    number = alone / variance if min(alone, variance) > NOTHING and len(blocks) > 1 else float(len(blocks))
    quantile = NORMAL * (1 + (NORMAL**2 + 1) / (4 * free))  # Student's, by the first term of its expansion
    share = quantile**2 / number
    centre = (mean + share / 2) / (1 + share)
    half = quantile / (1 + share) * math.sqrt(alone / number + share / number / 4)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), tokens)


@dataclass(frozen=True)
class SharedTokens:
    """Figures along texts that the target writes.

    shared: tokens that both have, of the target's `size`. target_mass, draft_mass: the mean probability of these tokens
    in each model's own distribution, at temperature 1 and before the draft's is renormalised. No draft is accepted with
    a higher probability than target_mass. draft_tokens_per_token: how many tokens the draft reads for each of the
    target's. read_us_per_token: microseconds for each of the target's tokens to find them, if it has come before.
    """

    shared: int
    size: int
    target_mass: float
    draft_mass: float
    draft_tokens_per_token: float
    read_us_per_token: float

    @property
    def verdict(self) -> str:
        """The figures in words."""
        return (
            f"the vocabularies differ: they share {self.shared} of the target's {self.size} tokens, which have"
            f" {self.target_mass:.1%} of the target's probability and {self.draft_mass:.1%} of the draft's, so at most"
            f" {self.target_mass:.1%} of the drafted tokens can be accepted at temperature 1; for a token of the target"
            f" the draft reads {self.draft_tokens_per_token:.2f} of its own, found in {self.read_us_per_token:.2g} us"
        )


def measure_shared(
    config: EngineConfig, target: Checkpoint, vocabulary: MappedVocabulary, texts: Sequence[Text]
) -> SharedTokens:
    """Measure on texts how much the configured pair shares. Loads the draft again, with its whole head."""
    draft = load_model(
        str(config.draft_model), config.dtype, config.device, role="draft", kernels=config.kernels,
        kv_cache_dtype=config.kv_cache_dtype,
    )  # fmt: skip

    def split(tokens: Sequence[int]) -> list[list[int]]:
        return [vocabulary.draft_tokens(each) for each in vocabulary.split(tokens)]

    sampler, tokens = target.backend.sampler, [each for text in texts for each in (*text.prompt, *text.output)]
    rows = [row for row in vocabulary.shared.values() if row < draft.model.vocab_size]
    vocabulary.read(tokens)  # each token is spelt once
    started = time.perf_counter()
    read = vocabulary.read(tokens)
    seconds = time.perf_counter() - started
    return SharedTokens(
        len(vocabulary.shared),
        vocabulary.size,
        _mass(TextReader(target.model, sampler, vocabulary.size).logits, texts, [*vocabulary.shared]),
        _mass(TextReader(draft.model, sampler, draft.model.vocab_size, split).logits, texts, rows),
        len(read) / len(tokens),
        1e6 * seconds / len(tokens),
    )


def _mass(logits: Callable[[Text], Tensor], texts: Sequence[Text], tokens: Sequence[int]) -> float:
    """Return the mean probability of some tokens along texts."""
    return float(torch.cat([logits(text).double().softmax(-1)[:, tokens].sum(-1) for text in texts]).mean())


LONGEST = 10  # the longest draft whose speed is predicted
STEP_LENGTHS = (*range(LONGEST + 1), 12, 16)  # whose steps are measured
OTHER_LENGTHS = (0, 1, 2, 4, 7, 10)  # the same for drafts in other types: drafting alone differs, and is almost linear
NUM_PROMPTS = 8  # of built-in code
_COST_SECONDS = 6.0  # for measuring steps
SPEED_SECONDS = 8.0  # for measuring speed
_FEWEST_ROUNDS, MOST_ROUNDS = 3, 9
FEWEST_TOKENS = 2  # per text: the first one comes with the prompt and is never drafted


@dataclass(frozen=True)
class Size:
    """parameters: of the checkpoint's files. values_per_token: keys and values in the cache for one position."""

    parameters: int
    values_per_token: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Size:
        """Return the size of the model that a config.json describes."""
        decoder: DecoderConfig = plugins.load("speculant.models", config["model_type"]).read_config(config)
        return cls(parameters(decoder), values_per_position(decoder))


@dataclass(frozen=True)
class Model:
    """The size of a model."""

    name: str
    parameters: int
    dtype: str
    kernels: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Model:
        """Describe a checkpoint; the parameters are counted in its files."""
        parameters = Size.of(checkpoint.config).parameters
        dtype = str(checkpoint.dtype).removeprefix("torch.")
        return cls(checkpoint.name, parameters, dtype, checkpoint.kernels)


@dataclass(frozen=True)
class Candidate:
    """The draft model with its weights in one type; quantization None = the checkpoint's own.

    vocabulary: the one that it was loaded with; None = the target's.
    """

    quantization: str | None
    checkpoint: Checkpoint
    runtime: Runtime
    vocabulary: TargetVocabulary | None = None

    @property
    def name(self) -> str:
        """The name in the report."""
        return self.quantization or UNCHANGED

    def acceptance(self, target: Checkpoint, texts: Sequence[Text], params: SamplingParams) -> list[TextAcceptance]:
        """Return the acceptance of its tokens along texts of the target."""
        sampler, size = target.backend.sampler, target.model.vocab_size
        split = self.vocabulary.split if isinstance(self.vocabulary, MappedVocabulary) else None
        reader = TextReader(self.checkpoint.model, sampler, size, split)
        return measure_acceptance(TextReader(target.model, sampler, size), reader, texts, params)


@dataclass(frozen=True)
class SpeedPrediction:
    """The prediction for a draft model in one type: speeds, and tokens per pass, by length from 0 on.

    correlation: of the acceptance of neighbours (`lab/theory/speedup.py`); None = not known. rates: the probability
    that a node gains a token if the nodes before it did, for drafts in which it differs from node to node.
    """

    alpha: Estimate
    costs: LengthCosts
    speeds: Array
    tokens: Array
    correlation: float | None = 0.0
    rates: Sequence[float] = ()

    @property
    def best_length(self) -> int:
        """The length with the highest predicted speed."""
        return best_length(self.speeds)

    @property
    def best_draft(self) -> int:
        """The same without length 0."""
        return best_length(self.speeds[1:]) + 1


@dataclass(frozen=True)
class Findings:
    """The result of all measurements.

    `predictions` are by the type of the draft's weights, or by another setting, the usual one first. The speed was
    measured with the setting `chosen`, at `length`; predicted: the prediction of that speed on the same texts. options:
    the method's options in that setting. lacks: how many of the target's tokens the
    draft model lacks. shared: what the two share if the draft has another tokenizer; None = it has the target's.
    """

    target: Model
    draft: Model
    params: SamplingParams
    num_texts: int
    predictions: Mapping[str, SpeedPrediction]
    chosen: str
    length: int
    case: BenchCase
    predicted: float
    lacks: int = 0
    shared: SharedTokens | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def usual(self) -> SpeedPrediction:
        """The prediction for the usual setting."""
        return next(iter(self.predictions.values()))

    @property
    def speed(self) -> Spread:
        """The measured speed over plain decoding, without first tokens."""
        return self.case.ratios(PLAIN, SPECULATIVE)["itl_mean_s"]

    @property
    def accepted(self) -> Estimate | None:
        """Accepted over tested tokens in the first measured round; later rounds can be the same."""
        return pooled(self.case.runs[SPECULATIVE][0].by_request)

    @property
    def pays(self) -> bool | None:
        """Whether drafting is faster; None = the rounds disagree."""
        speed = self.speed
        return None if speed.q1 <= 1 <= speed.q3 else speed.median > 1


def check_pair(config: EngineConfig, prompts: WorkloadConfig, params: SamplingParams, notify: Notify) -> Findings:
    """Load a pair, measure it and predict its speed.

    config names both models; its limits are replaced by those of one sequence. Raises PairError if they share no
    tokens, and ModelError, ConfigError or RequestError if a part can't be loaded or run.
    """
    params = replace(params, min_tokens=FEWEST_TOKENS)
    notify("Loading the models")
    target, candidates = load_pair(config)
    workload = make_workload(prompts, candidates[0].runtime, NUM_PROMPTS)
    require_room(workload, params.max_tokens or 1, candidates[0].runtime.limits)
    notify("Generating texts with the target")
    texts = write_texts(candidates[0].runtime, workload, params)
    notify("Measuring acceptance")
    acceptance = {each.name: each.acceptance(target, texts, params) for each in candidates}
    notify("Measuring the cost of steps")
    costs = _costs(candidates, workload.prompts[0], params, target.model.needs.most_nodes)
    predictions = {each.name: predict(acceptance[each.name], costs[each.name], costs[UNCHANGED]) for each in candidates}
    chosen = max(candidates, key=lambda each: float(predictions[each.name].speeds[1:].max()))
    notify("Measuring speed")
    best = predictions[chosen.name]
    case, predicted = _measure(chosen, workload, params, acceptance[chosen.name], best, costs[UNCHANGED])
    draft, vocabulary = Model.of(candidates[0].checkpoint), candidates[0].vocabulary
    shared = measure_shared(config, target, vocabulary, texts) if isinstance(vocabulary, MappedVocabulary) else None
    return Findings(
        Model.of(target), draft, params, len(texts), predictions, chosen.name, best.best_draft, case, predicted,
        vocabulary.lacks if vocabulary else 0, shared,
    )  # fmt: skip


def load_pair(config: EngineConfig) -> tuple[Checkpoint, list[Candidate]]:
    """Load the target, and the draft model in its own type and in each type to which its backend can round weights."""
    alone = replace(config, max_num_seqs=1, speculative_config={"draft_length": "fixed"})
    target = load_target(config)
    own = _candidate(alone, target, None)
    return target, [own, *(_candidate(alone, target, each) for each in own.checkpoint.quantizations)]


def _candidate(config: EngineConfig, target: Checkpoint, quantization: str | None) -> Candidate:
    config = replace(config, draft_quantization=quantization)
    return load_draft(config, target, build_around(config, target))


def load_draft(config: EngineConfig, target: Checkpoint, runtime: Runtime) -> Candidate:
    """Load the configured draft model. runtime: an engine that drafts with it."""
    folder = resolve_source(str(config.draft_model), "draft")
    vocabulary = draft_vocabulary(folder, target, runtime.tokenizer)
    checkpoint = load_model(
        str(config.draft_model), config.dtype, config.device,
        role="draft", kernels=config.kernels, quantization=config.draft_quantization, vocabulary=vocabulary,
        weight_packing=config.weight_packing, weight_cache=config.weight_cache_folder(),
        model_backend=config.draft_model_backend, kv_cache_dtype=config.kv_cache_dtype,
    )  # fmt: skip
    return Candidate(config.draft_quantization, checkpoint, runtime, vocabulary)


def write_texts(runtime: Runtime, workload: Workload, params: SamplingParams) -> list[Text]:
    """Return texts that the target writes."""
    outputs = Bench(runtime).run(workload, Mode(params, sequential=True)).outputs
    given = map(runtime.prompt_and_source, workload.prompts)
    return [Text(prompt, output, source) for (prompt, source), output in zip(given, outputs, strict=True)]


def _costs(
    candidates: Sequence[Candidate], prompt: Sequence[int], params: SamplingParams, most: int | None
) -> dict[str, LengthCosts]:
    """Measure the costs of drafts of each type. most: the nodes that the target takes; None = any number."""
    own = [length for length in STEP_LENGTHS if most is None or length <= most]
    lengths = {each.name: own if each.quantization is None else OTHER_LENGTHS for each in candidates}
    return measure_steps(lengths, {each.name: each.runtime for each in candidates}, prompt, params, _COST_SECONDS)


def predict(
    acceptance: Sequence[TextAcceptance], costs: LengthCosts, usual: LengthCosts, longest: int = LONGEST
) -> SpeedPrediction:
    """Predict the speeds of lengths up to the longest from the acceptance along texts and the costs of steps.

    usual: the costs with the draft model in its own type; the times without drafting are taken from these, as they are
    the same for every type.
    """
    texts = [each.given for each in acceptance]
    passes = np.sum([expected_costs(text, np.ones(longest + 1)) for text in texts], axis=0)
    num_tokens = sum(len(text) for text in texts)
    return SpeedPrediction(
        estimate([each.overlap for each in acceptance]),
        costs,
        predicted_speeds(texts, costs, usual, longest),
        num_tokens / passes,
        correlation_of([each.overlap for each in acceptance]),
    )


def predicted_speeds(texts: Sequence[Array], costs: LengthCosts, usual: LengthCosts, longest: int = LONGEST) -> Array:
    """Return the speed over plain decoding by length, for texts with this acceptance at their tokens."""
    lengths = np.arange(longest + 1)
    times = np.interp(lengths, costs.lengths, costs.draft_s) + np.interp(lengths, usual.lengths, usual.other_s)
    total = np.sum([expected_costs(text, times / times[0]) for text in texts], axis=0)
    speeds: Array = sum(len(text) for text in texts) / total
    return speeds


def _measure(
    chosen: Candidate,
    workload: Workload,
    params: SamplingParams,
    acceptance: Sequence[TextAcceptance],
    best: SpeedPrediction,
    usual: LengthCosts,
) -> tuple[BenchCase, float]:
    """Measure plain decoding and the best length in turn, on the prompts for which there is time.

    Returns the measurements, and the predicted speed on the texts of these prompts.
    """
    length, seconds = best.best_draft, [len(text.given) * usual.plain_s for text in acceptance]
    case = measure_speed(chosen.runtime, workload, params, length, seconds, float(best.speeds[length]))
    count = len(case.workload.prompts)
    speeds = predicted_speeds([text.given for text in acceptance[:count]], best.costs, usual)
    return case, float(speeds[length])


def measure_speed(
    runtime: Runtime, workload: Workload, params: SamplingParams, length: int, seconds: Sequence[float], speed: float
) -> BenchCase:
    """Measure plain decoding and drafts of one length in turn, on the prompts for which there is time.

    seconds: of plain decoding for each prompt. speed: the expected speed over plain decoding.
    """
    per_round = np.cumsum(seconds) * (1 + 1 / speed)
    count = max(1, int(np.searchsorted(per_round, SPEED_SECONDS / _FEWEST_ROUNDS)))
    rounds = int(np.clip(SPEED_SECONDS / max(per_round[:count][-1], 1e-9), _FEWEST_ROUNDS, MOST_ROUNDS))
    part = workload.first(count)
    speculative = replace(params, speculation={"num_speculative_tokens": length})
    modes = both_ways(speculative, speculating=True, sequential=True)
    return measure(ways_of(Bench(runtime), modes), part, rounds, lambda name: None)


RULE = "rejection"  # the verifier; both estimates are of its acceptance


@dataclass(frozen=True)
class Alpha:
    """The estimates for drafts of `length` tokens.

    overlap: mean of sum min(p, q) along texts that the target wrote. accepted: accepted / tested of drafts for the same
    prompts, None if nothing was tested. correlation: of neighbours' acceptance. tokens_per_pass: of these drafts,
    without the first token of a text, which comes with its prompt. expected_per_pass: its expectation along the texts
    that the target wrote (`lab/theory/speedup.py`).
    """

    length: int
    overlap: Estimate
    accepted: Estimate | None
    correlation: float
    tokens_per_pass: float
    expected_per_pass: float


def measure_alpha(
    target: Checkpoint, draft: Candidate, workload: Workload, params: SamplingParams, length: int
) -> Alpha:
    """Let the target write texts, compare the models' distributions along them, and draft for the same prompts.

    params: temperature, top-k, top-p and min-p; other settings are not part of the distributions. Raises RequestError
    if a prompt and `params.max_tokens` do not fit into the context.
    """
    found = draft.acceptance(target, write_texts(draft.runtime, workload, params), params)
    drafting = replace(params, speculation={"num_speculative_tokens": length, "verification": RULE})
    run = Bench(draft.runtime).run(workload, Mode(drafting, sequential=True))
    passes = sum(expected_costs(each.given, np.ones(length + 1))[length] for each in found)
    return Alpha(
        length,
        estimate([each.overlap for each in found]),
        pooled(run.by_request),
        correlation_of([each.overlap for each in found]),
        sum(len(output) - 1 for output in run.outputs) / (run.steps - len(run.outputs)),
        sum(len(each.given) for each in found) / float(passes),
    )
