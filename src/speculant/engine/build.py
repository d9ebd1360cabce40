"""Puts an engine together from a configuration: everything is checked here, not at the first request."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from speculant import plugins
from speculant.cache.base import CacheShape, KVCache
from speculant.config import EngineConfig, Limits, SpeculativeConfig, resolve
from speculant.drafting.base import Drafter, DrafterContext, Method
from speculant.engine.engine import Engine, EngineOptions
from speculant.engine.memory import CacheMemory
from speculant.errors import ConfigError, suggest
from speculant.models.base import CausalLM
from speculant.models.weights import Checkpoint, load_model
from speculant.sampling.chance import KeyedChances
from speculant.scheduling.draft_length import Fixed
from speculant.text.tokenizer import Tokenizer, compare_vocabularies
from speculant.verification.base import Verifier

logger = logging.getLogger(__name__)

_DRAFTERS, _VERIFIERS = "speculant.drafting", "speculant.verification"


@dataclass(frozen=True)
class Runtime:
    """An engine and what stands around it. `speculation` says what drafts, or why nothing does.

    drafting_beams: whether it drafts for beam searches too.
    """

    engine: Engine
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    limits: Limits
    drafting: bool
    drafting_beams: bool
    speculation: str


def build_engine(config: EngineConfig) -> Runtime:
    """Load the target, its tokenizer and the drafter, and check that they fit each other."""
    target = load_model(
        config.model, config.dtype, config.device, kernels=config.kernels, quantization=config.quantization
    )
    tokenizer = Tokenizer.from_folder(target.folder)
    limits = resolve(config, target.model.max_positions)
    spec = config.speculative()
    name = method_name(spec) if spec else None
    memory = CacheMemory.of(config, limits, target.model.cache_shape)
    verifiers, _ = build_verifiers(spec)
    drafter = build_drafter(config, target, tokenizer, memory.make)
    drafter_caches = tuple(memory.made)
    length = _draft_length(spec, name, drafter) if spec and name and drafter else 0
    engine = Engine(
        EngineOptions(limits, config.seed, target.eos_token_ids, spec.verification if spec else "auto", target.native),
        target.model,
        memory.make_target(),
        KeyedChances(target.native),
        verifiers,
        Fixed(length),
        drafter,
        drafter_caches,
    )
    says = f"{name}, {length} tokens a step" if drafter else config.why_not_speculative()
    if spec and drafter and spec.verification in verifiers and not verifiers[spec.verification].lossless:
        says += f", {spec.verification} and so NOT LOSSLESS"
    logger.info("speculation is %s: %s", "on" if drafter else "off", says)
    beams = drafter is not None and drafter.needs.nodes_per_beam is not None
    return Runtime(engine, tokenizer, target, limits, drafter is not None, beams, says)


def load_verifiers() -> dict[str, Verifier]:
    """Return every verification rule by name."""
    return build_verifiers(None)[0]


def build_verifiers(spec: SpeculativeConfig | None) -> tuple[dict[str, Verifier], dict[str, Any]]:
    """Make every rule, the configured one with its own options; return them by name, and what options are left."""
    makers = {name: plugins.load(_VERIFIERS, name).build for name in plugins.names(_VERIFIERS)}
    chosen, given = (spec.verification, spec.options) if spec else ("auto", {})
    known = inspect.signature(makers[chosen]).parameters if chosen in makers else {}
    own = {key: value for key, value in given.items() if key in known}
    verifiers = {name: make(**own) if name == chosen else make() for name, make in makers.items()}
    return verifiers, {key: value for key, value in given.items() if key not in known}


def method_name(spec: SpeculativeConfig) -> str:
    """Return the method's name and check that a model is named just when it uses one."""
    name = spec.method or next(n for n in plugins.names(_DRAFTERS) if _method(n).preferred)
    if _method(name).uses_model and spec.model is None:
        raise ConfigError(f"method {name!r} drafts with a model and none is named", "set draft_model=... too.")
    if spec.model is not None and not _method(name).uses_model:
        raise ConfigError(
            f"method {name!r} uses no model, but draft model {spec.model!r} is named", "leave out one of the two."
        )
    return name


def _method(name: str) -> Method:
    method: Method = plugins.load(_DRAFTERS, name).METHOD
    return method


def _draft_length(spec: SpeculativeConfig, name: str, drafter: Drafter) -> int:
    if spec.draft_length != "fixed":
        raise ConfigError(f"draft_length={spec.draft_length!r} is unknown", suggest(spec.draft_length, ["fixed"]))
    return spec.num_speculative_tokens or drafter.needs.usual_nodes or _method(name).default_length


def build_drafter(
    config: EngineConfig, target: Checkpoint, tokenizer: Tokenizer, make_cache: Callable[[CacheShape], KVCache]
) -> Drafter | None:
    """Make what drafts for a target; None if nothing does."""
    spec = config.speculative()
    if spec is None:
        return None

    def load_draft(source: str) -> CausalLM:
        draft = load_model(
            source, config.dtype, config.device, role="draft",
            kernels=config.kernels, quantization=config.draft_quantization,
        )  # fmt: skip
        compare_vocabularies(tokenizer, Tokenizer.from_folder(draft.folder))
        return draft.model

    context = DrafterContext(
        options=build_verifiers(spec)[1],
        model=spec.model,
        vocab_size=target.model.vocab_size,
        device=target.model.cache_shape.device,
        chances=KeyedChances(target.native),
        kernels=target.native,
        max_num_batched_tokens=config.max_num_batched_tokens,
        load_draft=load_draft,
        make_cache=make_cache,
    )
    drafter: Drafter = plugins.load(_DRAFTERS, method_name(spec)).build(context)
    return drafter


def generation_defaults(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the sampling settings that a checkpoint recommends, under this package's names."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found = {name: checkpoint.generation[name] for name in names if checkpoint.generation.get(name) is not None}
    return found if checkpoint.generation.get("do_sample") else {}
