"""Builds an engine from a configuration and checks everything here, not at the first request."""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speculant import plugins
from speculant.cache import CacheShape, KVCache
from speculant.config import DEFAULT_POLICY, EngineConfig, Limits, SpeculativeConfig, resolve
from speculant.drafting import (
    DEFAULT,
    LOOKUPS,
    PREDICTION,
    WITH_MODEL,
    CompositeDrafter,
    Drafter,
    DrafterContext,
    Drafters,
    DraftModels,
    Target,
    build_method,
    first_installed,
    installed,
    method_facts,
    method_within,
    named_kind,
    takes_model,
)
from speculant.drafting.methods import KIND
from speculant.engine.draft_loading import DraftLoader
from speculant.engine.engine import Engine, EngineOptions
from speculant.engine.fair_steps import FairSteps
from speculant.engine.memory import CacheMemory
from speculant.engine.nearby import FoundDraft, find_drafts
from speculant.engine.precision import AUTO, LARGE_BYTES, HeadRounding, rounded
from speculant.errors import CapacityError, ConfigError, ModelError, PairError, RequestError, SpeculantError
from speculant.files import forget_measured
from speculant.lengths import (
    LONGEST,
    SLICE_S,
    START_S,
    Calibration,
    DraftLength,
    DraftLengthContext,
    Measurement,
    completed,
)
from speculant.models import (
    PLAIN,
    Checkpoint,
    CheckpointFiles,
    TimesWeights,
    background,
    check_loading,
    choose_backend,
    find_backends,
    load_model,
    read_model_config,
    resolve_source,
    resolve_tokenizer,
    scratch_of,
    stored_bytes,
    tensor_shapes,
    weight_bytes_of,
)
from speculant.sampling import KeyedChances
from speculant.text import Tokenizer
from speculant.types import DraftPrice
from speculant.verification import Verifier

if TYPE_CHECKING:
    from speculant.engine.learning import Learning

logger = logging.getLogger(__name__)

MOST_TRIED, LEAST_GAIN_FOUND = 2, 1.0  # drafts that nobody named, and the least expected speed of one over plain
_NO_FILES: Mapping[str, Any] = {"weight_cache": "off", "prompt_cache": None, "prompt_cache_size": 1, "learn": None}
_BITS = {"int8": 9, "int4": 5}  # of a weight in memory with its share of the scales, at most
_VERIFIERS, _LENGTHS = "speculant.verification", "speculant.lengths"


@dataclass(frozen=True)
class Runtime:
    """An engine, its tokenizer and checkpoint. `speculation` names the drafter, or the reason why there is none.

    context: how long a sequence may be, and the reason if that is shorter than the model allows.
    drafting_beams: whether it drafts for beam searches too. prediction_method: the method for a request with a
    prediction; None = predictions are not used. most_draft_tokens: the configured number, or the most that the
    policy chooses. memory_bytes: of weights, caches and scratch memory.
    """

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    limits: Limits
    drafting: bool
    drafting_beams: bool
    speculation: str
    context: str
    most_draft_tokens: int
    memory_bytes: int
    prediction_method: str | None = None

    @property
    def start_tokens(self) -> tuple[int, ...]:
        """The tokens with which an encoder-decoder model's decoder begins; raises RequestError if they are unknown."""
        if not self.checkpoint.start_tokens:
            raise RequestError(
                "the checkpoint names no decoder_start_token_id, with which the decoder begins",
                'give {"encoder_prompt": ..., "decoder_prompt": ...}, or add it to config.json.',
            )
        return self.checkpoint.start_tokens

    def prompt_and_source(self, tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the prompt and the source of a plain prompt, which an encoder-decoder model reads as its source."""
        return (self.start_tokens, tokens) if self.checkpoint.model.needs.source else (tokens, ())


@background.without_collections()
@background.postponed()
def build_engine(config: EngineConfig, steps: FairSteps | None = None) -> Runtime:
    """Load the target, its tokenizer and the drafter, and check that they fit each other. steps: see `AsyncEngine`."""
    find_backends(config.kernels, config.quantization, "quantization")
    if config.draft_quantization != AUTO:
        find_backends(config.kernels, rounded(config.draft_quantization), "draft_quantization")
    check_loading(
        config.dtype, config.device, config.quantization, config.weight_packing, config.model_backend,
        config.kv_cache_dtype,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as beside:  # reading the tokenizer of a large vocabulary takes half a second
        folder = resolve_source(config.model, "target", config.revision, config.download_dir)
        tokenizer = beside.submit(load_tokenizer, config, folder)
        target = load_target(config)
        return build_around(config, target, tokenizer.result(), steps)


def load_target(config: EngineConfig) -> Checkpoint:
    """Load the target. If `measure` is set, delete the measurements of this machine first."""
    if config.measure:
        forget_measured()
    return load_model(
        config.model, config.dtype, config.device, kernels=config.kernels, quantization=config.quantization,
        weight_packing=config.weight_packing, weight_cache=config.weight_cache_folder(),
        revision=config.revision, download_dir=config.download_dir, model_backend=config.model_backend,
        kv_cache_dtype=config.kv_cache_dtype,
    )  # fmt: skip


def build_around(
    config: EngineConfig, target: Checkpoint, tokenizer: Tokenizer | None = None, steps: FairSteps | None = None
) -> Runtime:
    """Build an engine around a loaded target; several engines may share one. tokenizer: the target's, if known."""
    tokenizer = tokenizer or load_tokenizer(config, target.folder)
    spec = with_kind(config) if drafts(config, target) else None
    longest, limits = target.model.max_positions, resolve_for(config, target)
    scratch = scratch_of(target.model, limits.max_num_batched_tokens, limits.max_model_len)
    shape, has_source = target.model.cache_shape, target.model.needs.source
    memory = CacheMemory.of(config, limits, shape, target.mapped_bytes, scratch, has_source)
    verifiers, _ = build_verifiers(spec)
    spec, drafters, notes = choose_drafters(config, spec, target, tokenizer, memory)
    name = method_name(spec) if spec else None
    length = (spec.num_speculative_tokens if spec else None) or (drafters.usual_length(name) if name else 0)
    sampler, cache = target.backend.sampler, memory.make_target()
    _keep_prompts(config, target, cache, limits, not drafters.needs.reads.encoder)
    limits, context = memory.limits, memory.context(longest)
    if limits.max_model_len < (config.max_model_len or longest):
        logger.warning("max_model_len is %s", context)
    facts = str(replace(config, seed=0, measure=False, **_NO_FILES))  # costs depend on none of these
    identity = (facts, target.kernels, str(target.folder), notes)
    seq_ids = itertools.count(1)
    measured = Calibration(target.model, cache, sampler, drafters.sub_drafters, limits, identity, seq_ids)
    policy = _draft_length(spec, length, drafters, measured)
    engine = Engine(
        EngineOptions(
            limits,
            _seed(config),
            target.eos_token_ids,
            _verification(config, spec),
            sampler,
            target.start_tokens,
            target.output_rules,
        ),
        target.model,
        cache,
        KeyedChances(sampler),
        verifiers,
        policy,
        drafters,
        measured,
        seq_ids,
        _learning(config, target, tokenizer, drafters),
    )
    # A small model takes a second. The slots of a slotted cache may all be taken later.
    whole = 2 * target.weights < LARGE_BYTES or config.kv_cache_backend == "slotted"
    _measure(measured, math.inf if whole else START_S, steps)
    drafter = drafters.find(name) if name else None
    says = describe(config, spec, length, drafter) + notes
    if config.model_backend != AUTO:
        says += f"; the target is computed by {target.kernels}"
    if spec and spec.verification in verifiers and not verifiers[spec.verification].lossless:
        says += f", {spec.verification} and so NOT LOSSLESS"
    logger.info("speculation is %s: %s", "on" if drafter else "off", says)
    beams = drafter is not None and drafter.needs.nodes_per_beam is not None
    predicts = installed(PREDICTION)[:1] if config.use_speculative_decoding is not False else []
    most = (spec.num_speculative_tokens if spec else None) or max(length, LONGEST)
    size = weight_bytes_of(target.model) + drafters.weight_bytes + memory.used + scratch
    return Runtime(engine, tokenizer, target, limits, drafter is not None, beams, says, context, most, size, *predicts)


def _measure(measurement: Measurement, seconds: float, steps: FairSteps | None) -> None:
    """Measure for this long. Steps of other engines would disturb the measurement, so it takes turns with them."""
    if steps is None:
        measurement.run(seconds)
        return
    while measurement.active and seconds > 0:
        with steps.turn(measurement, lambda: False):
            started = time.perf_counter()
            measurement.run(SLICE_S)
            seconds -= time.perf_counter() - started


def expected_bytes(config: EngineConfig) -> int:
    """Return about how many bytes an engine without drafts will take, from the headers of its files.

    They are of its weights, the configured keys and values, and scratch memory. The weights of a model that
    transformers computes take as many as in its files. Raises ModelError or ConfigError.
    """
    place, keys = resolve_source(config.model, "target", config.revision, config.download_dir), config.kv_memory_bytes()
    if config.model_backend != AUTO:
        return (keys or 0) + sum(file.stat().st_size for file in place.glob("*.safetensors"))
    files = CheckpointFiles.open(place)
    return (keys or 0) + _expected_weights(config, files) + _expected_scratch(config, files)


def _expected_weights(config: EngineConfig, files: CheckpointFiles) -> int:
    size, bits = files.dtype(config.dtype).itemsize, _BITS.get(config.quantization or "")
    quantised = bool(files.tensors.quantised_kinds())
    found = 0
    for name, shape in tensor_shapes(files.decoder).items():
        if bits is not None and len(shape) > 1:
            found += math.prod(shape) * bits // 8
        else:
            found += stored_bytes(files.weights.kind(name), shape) if quantised else math.prod(shape) * size
    return found


def _expected_scratch(config: EngineConfig, files: CheckpointFiles) -> int:
    of, dtype, device = files.decoder, files.dtype(config.dtype), torch.device(config.device)
    backend, _ = choose_backend(config.kernels, config.quantization, of, dtype, device, PLAIN)  # others are timed first
    limits = resolve(config, of.max_positions, of.encoder is not None)
    if not isinstance(backend, TimesWeights):
        return 0
    return backend.scratch_bytes(of, limits.max_num_batched_tokens, limits.max_model_len)


def _keep_prompts(
    config: EngineConfig, target: Checkpoint, cache: KVCache, limits: Limits, keeps_sources: bool
) -> None:
    """Let a target's cache keep its prompts on disk, if a folder is configured."""
    folder = config.prompt_cache_folder()
    if folder is None:
        if config.prompt_cache_size != EngineConfig.prompt_cache_size:
            logger.warning("prompt_cache_size has no effect without prompt_cache, the folder")
        return
    from speculant.engine.prompt_cache import open_prompt_cache

    rows = () if target.backend.row_invariant else (limits.max_num_batched_tokens, torch.get_num_threads())
    open_prompt_cache(config, folder, target.model, target.folder, cache, keeps_sources, rows)


def _learning(config: EngineConfig, target: Checkpoint, tokenizer: Tokenizer, drafters: Drafters) -> Learning | None:
    """Return what keeps the drafters' learning, begun with what the folder has; None = it is not kept."""
    folder = config.learn_folder()
    if folder is None:
        return None
    from speculant.engine.learning import LearnedFiles, Learning, target_digest

    size = target.model.vocab_size
    digest = target_digest(target.folder, tokenizer, size)
    learning = Learning(LearnedFiles(folder, digest, str(config.model)), drafters, size)
    background.start(learning.start())
    return learning


def resolve_for(config: EngineConfig, target: Checkpoint) -> Limits:
    """Return the limits of an engine for a target, before memory lowers them."""
    return resolve(config, target.model.max_positions, target.model.needs.source)


def _seed(config: EngineConfig) -> int:
    """Return the seed of requests without one of their own: the configured one, else one that no other engine has."""
    return secrets.randbits(63) if config.seed is None else config.seed


def load_tokenizer(config: EngineConfig, folder: Path) -> Tokenizer:
    """Load the tokenizer of a target in a folder: its own, or the configured one."""
    if config.tokenizer is None and config.tokenizer_revision is None:
        return Tokenizer.load(folder)
    source = config.tokenizer or config.model
    return Tokenizer.load(
        resolve_tokenizer(source, revision=config.tokenizer_revision, download_dir=config.download_dir)
    )


def drafts(config: EngineConfig, target: Checkpoint) -> bool:
    """Whether the engine drafts for requests that do not set `speculation`."""
    return config.use_speculative_decoding is not False and (config.names_speculation or target.backend.row_invariant)


def describe(config: EngineConfig, spec: SpeculativeConfig | None, length: int, drafter: Drafter | None) -> str:
    """Describe the drafts that requests get, or the reason why they get none.

    A method that combines others is described by the names of these.
    """
    if spec is None:
        if config.use_speculative_decoding is False:
            return "use_speculative_decoding is False"
        return (
            "here a token's logits depend on the batch, in their last bits; use_speculative_decoding=True turns it on"
        )
    policy = spec.policy["policy"]
    lengths = f"{length} tokens a step" if policy == "fixed" else f"{policy} length"
    facts = ["no draft model is named"] if spec.method is None and spec.model is None else []
    name = method_name(spec)
    if isinstance(drafter, CompositeDrafter):
        name, facts = ", ".join(reversed([*drafter.sub_drafters])), [f"method {name}", *facts]
    return f"{name} ({', '.join(facts)}), {lengths}" if facts else f"{name}, {lengths}"


def load_verifiers() -> dict[str, Verifier]:
    """Return every verifier by name."""
    return build_verifiers(None)[0]


def build_verifiers(spec: SpeculativeConfig | None) -> tuple[dict[str, Verifier], dict[str, Any]]:
    """Make every verifier, the configured one with its options; return them by name, and the remaining options."""
    makers = {name: plugins.load(_VERIFIERS, name).build for name in plugins.names(_VERIFIERS)}
    chosen, given = (spec.verification, spec.options) if spec else ("auto", {})
    known = inspect.signature(makers[chosen]).parameters if chosen in makers else {}
    own = {key: value for key, value in given.items() if key in known}
    verifiers = {name: make(**own) if name == chosen else make() for name, make in makers.items()}
    return verifiers, {key: value for key, value in given.items() if key not in known}


def _verification(config: EngineConfig, spec: SpeculativeConfig | None) -> str:
    """Return the verifier of requests that name none.

    With an engine's seed it is `match`: under a ratio rule the text would depend on the drafts' lengths, and so on the
    times of steps.
    """
    named = spec.verification if spec else "auto"
    return "match" if named == "auto" and config.seed is not None else named


def method_name(spec: SpeculativeConfig) -> str:
    """Return the method's name, and check that a model is named if and only if the method needs one."""
    name = spec.method or _usual_method(spec)
    facts = method_facts(name)
    if facts.uses_model and not facts.in_target and spec.model is None:
        raise ConfigError(f"method {name!r} drafts with a model and none is named", "set draft_model=... too.")
    if spec.model is not None and not takes_model(name):
        raise ConfigError(
            f"method {name!r} uses no model, but draft model {spec.model!r} is named", "leave out one of the two."
        )
    return name


def with_kind(config: EngineConfig) -> SpeculativeConfig | None:
    """Return the speculative settings; a head without a named method is used by the method that its folder names."""
    spec = config.speculative()
    if spec is None or spec.method is not None or spec.model is None:
        return spec
    folder = resolve_source(spec.model, "draft", download_dir=config.download_dir)
    kind = named_kind(read_model_config(folder))
    return replace(spec, method=kind) if kind in plugins.names(KIND) else spec


def with_own_head(spec: SpeculativeConfig | None, target: Checkpoint) -> SpeculativeConfig | None:
    """Return the speculative settings; where no method and no model is named, a head of the target's own is used.

    It takes the place of the draft model: see `_usual_method`.
    """
    if spec is None or spec.method is not None or spec.model is not None or build_verifiers(spec)[1]:
        return spec
    head = method_within(target.folder, target.model.num_layers)
    if head is None:
        return spec
    if _has_settings(spec) or not installed(DEFAULT):
        return replace(spec, method=head)
    members = [*installed(*LOOKUPS), {"method": head, "model": str(target.folder)}]
    return replace(spec, method=DEFAULT, options={**spec.options, "members": members})


def _has_settings(spec: SpeculativeConfig) -> bool:
    """Whether a draft's length or other options are named."""
    return spec.num_speculative_tokens is not None or bool(spec.options) or spec.policy["policy"] != DEFAULT_POLICY


def _usual_method(spec: SpeculativeConfig) -> str:
    """Return the method that is used if none is named.

    With a model and settings for its drafts that is the method that drafts with a model alone.
    """
    if spec.model is None:
        return first_installed(DEFAULT, *LOOKUPS)
    return first_installed(WITH_MODEL) if _has_settings(spec) else first_installed(DEFAULT, WITH_MODEL)


def _policy(spec: SpeculativeConfig | None) -> tuple[Any, dict[str, Any]]:
    """Return the plugin of the configured draft-length policy, and its own options."""
    options = dict(spec.policy) if spec else {"policy": "fixed"}
    name = str(options.pop("policy"))
    try:
        return plugins.load(_LENGTHS, name), options
    except ConfigError as error:
        raise ConfigError(f"draft_length={name!r} is unknown", error.fix) from None


def _draft_length(
    spec: SpeculativeConfig | None, length: int, drafters: Drafters, measured: Calibration
) -> DraftLength:
    """Make the configured draft-length policy."""
    plugin, options = _policy(spec)
    longest = spec.num_speculative_tokens if spec else None
    context = DraftLengthContext(length, options, longest, measured.costs, drafters.needs_of, drafters.price)
    return completed(plugin.build(context))


def choose_drafters(
    config: EngineConfig, spec: SpeculativeConfig | None, target: Checkpoint, tokenizer: Tokenizer, memory: CacheMemory
) -> tuple[SpeculativeConfig | None, Drafters, str]:
    """Make the drafters, with a head of the target's own or a draft near it, if one can be used; see `build_drafters`.

    Returns the settings that were used, too. Whatever is wrong with a draft that nobody named, the engine starts.
    """
    own, cache = with_own_head(spec, target), lambda: memory.target
    if own is not spec:
        try:
            drafters, notes = build_drafters(config, own, target, tokenizer, memory.make, cache)
        except (CapacityError, ModelError, PairError) as error:
            logger.warning("the target's own head is not used: %s", error)
        else:
            return own, drafters, f", with the target's own head{notes}"
    elif spec is not None and _looks_near(config, target):
        for found in islice(find_drafts(target, tokenizer, config.download_dir), MOST_TRIED):
            near, started = _with_found(spec, found), time.perf_counter()
            logger.info("found the draft %s: %s", found.place, found.why)
            try:
                with memory.restored_on_error():
                    make = memory.make_if_roomy
                    drafters, notes = build_drafters(config, near, target, tokenizer, make, cache, LEAST_GAIN_FOUND)
            except Exception as error:
                unknown = None if isinstance(error, SpeculantError) else error
                logger.warning("the draft %s that was found is not used: %r", found.place, error, exc_info=unknown)
            else:
                logger.info("the draft was loaded and measured in %.1f s", time.perf_counter() - started)
                return near, drafters, f", found as {found.place} ({found.why}){notes}"
    return spec, *build_drafters(config, spec, target, tokenizer, memory.make, cache)


def _looks_near(config: EngineConfig, target: Checkpoint) -> bool:
    """Whether to look for a draft: not if the user says anything about drafts, nor for the embedded pair."""
    named = config.draft_model or config.spec_length or config.speculative_config
    return config.find_drafts and not named and config.model != "demo" and target.weights > 0


def _with_found(spec: SpeculativeConfig, found: FoundDraft) -> SpeculativeConfig:
    """Return the speculative settings with a draft that was found, which has the target's own tokens."""
    if found.method is None:
        return replace(spec, model=str(found.place), use_heterogeneous_vocab=False)
    members = [*installed(*LOOKUPS), {"method": found.method, "model": str(found.place)}]
    return replace(spec, method=DEFAULT, options={**spec.options, "members": members})


def build_drafters(
    config: EngineConfig,
    spec: SpeculativeConfig | None,
    target: Checkpoint,
    tokenizer: Tokenizer,
    make_cache: Callable[[CacheShape], KVCache],
    target_cache: Callable[[], KVCache | None] = lambda: None,
    least_gain: float | None = None,
) -> tuple[Drafters, str]:
    """Make the drafters for a target: for the configured method, and for its `methods` that requests may name.

    A method without a model need not be listed: it is made when a request names it. target_cache: see `Target`.
    least_gain: see `DraftLoader`. Returns the drafters, and notes for the user on their draft models.
    """
    facts = str(target.folder), target.kernels, config.dtype
    loader = DraftLoader(config, target, tokenizer, facts, spec.use_heterogeneous_vocab if spec else None, least_gain)
    workshop = _Workshop(config, spec, target, make_cache, target_cache, loader)
    drafters: dict[str, Drafter] = {}
    if spec is not None:
        drafters[method_name(spec)] = workshop.build(method_name(spec), build_verifiers(spec)[1])
        drafters |= {method: workshop.build(method, {}) for method in spec.methods if method not in drafters}
    name = method_name(spec) if spec else None
    made = Drafters(
        drafters, name, workshop.on_request, lambda method: method_facts(method).default_length,
        absence=describe(config, None, 0, None), num_layers=target.model.num_layers, prices=workshop.prices,
        weight_bytes=sum(weight_bytes_of(loaded) for loaded, _ in loader.folders),
    )  # fmt: skip
    return made, "".join(loader.notes)


@dataclass(frozen=True)
class _Workshop:
    """Makes the drafters of an engine."""

    config: EngineConfig
    spec: SpeculativeConfig | None
    target: Checkpoint
    make_cache: Callable[[CacheShape], KVCache]
    target_cache: Callable[[], KVCache | None]
    loader: DraftLoader
    prices: dict[str, DraftPrice] = field(default_factory=dict)  # by method

    def build(self, method: str, options: Mapping[str, Any]) -> Drafter:
        """Make a drafter, with the configured draft model; without one, with the head in the target's folder."""
        named = self.spec.model if self.spec else None
        own = str(self.target.folder) if method_facts(method).in_target else None
        return self._build(method, options, named or own)

    def on_request(self, method: str) -> Drafter:
        """Make a drafter that a request names; it can't load a model."""
        if self.config.use_speculative_decoding is False:
            raise ConfigError(
                f"a request names the drafting method {method!r}", "use_speculative_decoding is False; change it."
            )
        facts = method_facts(method)
        if facts.uses_model or not facts.on_request:
            raise ConfigError(
                f"method {method!r} was not loaded with the engine, and a request can't load it",
                'name it in speculative_config, as "method" or in the list "methods".',
            )
        return self._build(method, {}, None)

    def _build(self, method: str, options: Mapping[str, Any], draft_model: str | None) -> Drafter:
        policy, policy_options = _policy(self.spec)
        model, sampler, loader = self.target.model, self.target.backend.sampler, self.loader
        round_head = HeadRounding(self.target, self.config.draft_quantization, loader.facts, loader.notes)
        context = DrafterContext(
            options,
            draft_model,
            Target(model.vocab_size, model.cache_shape.device, sampler, model, loader.tokenizer, self.target_cache),
            DraftModels(loader.load, loader.vocabulary_of, loader.keep_prompts, round_head),
            self.make_cache,
            KeyedChances(sampler),
            resolve_for(self.config, self.target).max_num_batched_tokens,
            policy.stop_below(policy_options) if hasattr(policy, "stop_below") else 0.0,
            self.prices.setdefault(method, DraftPrice()),
        )
        drafter: Drafter = build_method(method_facts(method), plugins.load(KIND, method).build, context)
        if drafter.needs.target_inputs and model.needs.most_nodes is not None:
            raise ConfigError(
                f"method {method!r} adds rows to the target's passes, and its states take chains alone",
                "use another method.",
            )
        return drafter
