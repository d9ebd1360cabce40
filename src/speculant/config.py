"""The engine's configuration. Only `resolve` turns missing sizes into values."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculant.checks import (
    Check,
    check_fields,
    check_flag,
    check_name,
    check_place,
    check_positive,
    check_whole,
    is_whole,
    kind,
    one_of,
    optional,
)
from speculant.errors import ConfigError, suggest
from speculant.files import cache_folder
from speculant.params import MAX_LOGPROBS, MAX_SPECULATIVE_TOKENS

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float64", "float32", "bfloat16")
DTYPE_NAMES = {
    "half": "float32",
    "float16": "float32",
    "float": "float32",
}  # other types, and the type that computes them
CACHES = ("paged", "slotted")
CACHE_TYPES = ("auto", "int8", "bfloat16", "float32")
PACKINGS = ("auto", "plain", "12bit")
MODEL_BACKENDS = ("auto", "transformers")
DEFAULT_POLICY = "adaptive"  # of draft lengths
USUAL_ROWS = 512  # of a pass
USUAL_CONTEXT = 4096  # positions per sequence that memory and rows are set aside for, unless they are configured
POLICIES = ("first-come", "decode-first", "shortest-prompt")


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine; each field is a command-line flag and an environment variable.

    Speculation is off if `use_speculative_decoding` is False. None = on if `draft_model`, `spec_length` or
    `speculative_config` is given, or if the backend's results for a row do not depend on the batch. Otherwise a draft
    could change which of two nearly equal tokens is chosen. `spec_length` is another name of `num_speculative_tokens`.
    find_drafts: where nothing else is said about drafts, use a draft model or a head that lies near the target and
    fits (engine/nearby.py), if it is expected to pay.
    seed: for requests without their own seed. They are then verified by `match`, so that their texts are reproducible.
    None = sampled texts differ from run to run.

    max_model_len: positions per sequence, prompt and output together, and of a source. None = the model's maximum, or
    fewer if their keys and values do not fit into memory.
    max_num_batched_tokens: rows per pass, also of the encoder. None = 512, or for an encoder-decoder model enough for
    sources of max_model_len, but of at most 4096 tokens: a source is encoded in one pass.
    kv_cache_dtype: the type of stored keys and values, those of drafters too. "auto" = the model's. int8 needs about
    half the memory of bfloat16: numbers are rounded, with a scale for each head and token. A target with another type
    of cache is a different model, and speculation is exact with respect to it.
    kv_memory: the bound on all KV caches together, including the drafter's, in bytes or as text like "2GiB". None =
    enough for max_num_seqs sequences of max_model_len, or of 4096 positions if max_model_len is None and the model has
    more. It is at least one sequence of max_model_len, and at most half of the free memory.
    dtype: float16 (half) becomes float32, which represents the same numbers. A torch type is read by its name. For
    weights in blocks, such as GGUF's, "auto" is bfloat16, and native kernels use the type for keys and values alone.
    model_backend: "transformers" lets that package (extra `transformers`) compute the target, and a draft model unless
    speculative_config has a `model_backend` of its own. It runs any causal language model, slower, and a row's bits
    depend on the batch; so it is never chosen by itself. Weights can't be rounded then, and kernels has no effect.
    kernels: a backend (native, reference, or one of another package). "auto" = native if it supports the model,
    otherwise reference. It and the quantizations are checked when the engine is built.
    quantization, draft_quantization: weights of the target and of the draft in int8 or int4. A quantized target is a
    different model, and speculation is exact with respect to it. draft_quantization="auto" chooses the type that is
    expected to be fastest here (engine/precision.py); "none" or None leaves the draft's weights unchanged. A draft
    is a draft model, or a head on native kernels.
    weight_packing: how bfloat16 weights of target and draft are stored; both ways give the same bits. "12bit" needs
    three quarters of the memory, on the native kernels; "auto" = the faster one here, timed for large models.
    weight_cache: where packed weights are kept, so that the next start maps them: a folder, "auto" (or True) for one in
    $XDG_CACHE_HOME/speculant, "off" (or False). The native kernels use it for models of 64 MiB or more.
    prompt_cache: a folder in which the keys and values of prompts and texts are kept, so that no later request has to
    compute them, even after a restart; None = they are kept in memory alone. Several processes may share it.
    prompt_cache_size: the most bytes of its files, or text like "20GiB".
    learn: a folder in which drafters keep what they learn from texts, for later engines; they belong to whoever may
    read these files. None = nothing is kept.
    measure: forget what was measured on this machine (costs, and the types and packings chosen by them, of all models),
    and measure anew.
    tokenizer: a folder or hub id whose tokenizer replaces the model's. revision, tokenizer_revision: a branch, tag or
    commit of the model and of the tokenizer on the hub; without `tokenizer`, the model's revision applies to both.
    download_dir: the folder for downloads; None = the hub's own cache. max_logprobs: the most log-probabilities per
    token that a request may have; -1 = all.
    scheduling_policy: the order of requests (scheduling/scheduler.py). max_waiting: bounds the queue. At
    most max_num_seqs + max_waiting sequences are accepted; sequences without room in memory wait.
    """

    model: str
    draft_model: str | None = None
    spec_length: int | None = None
    use_speculative_decoding: bool | None = None
    speculative_config: Mapping[str, Any] | None = None
    find_drafts: bool = True
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    kv_cache_backend: str = "paged"
    kv_cache_dtype: str = "auto"
    kv_memory: int | str | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    scheduling_policy: str = "decode-first"
    max_waiting: int = 1024
    model_backend: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    draft_quantization: str | None = "auto"
    weight_packing: str = "auto"
    weight_cache: str | os.PathLike[str] | bool = "auto"
    prompt_cache: str | os.PathLike[str] | None = None
    prompt_cache_size: int | str = "20GiB"
    learn: str | os.PathLike[str] | None = None
    measure: bool = False
    seed: int | None = None
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    max_logprobs: int = MAX_LOGPROBS

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _read_dtype(self.dtype))
        object.__setattr__(self, "kv_cache_dtype", read_cache_dtype(self.kv_cache_dtype))
        check_fields(self, _ENGINE_CHECKS)
        self.kv_memory_bytes()
        self.prompt_cache_bytes()
        self.prompt_cache_folder()
        self.learn_folder()
        if (rows := self.max_num_batched_tokens or USUAL_ROWS) < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={rows} is below max_num_seqs={self.max_num_seqs}",
                "every running sequence needs a token per step; raise max_num_batched_tokens.",
            )
        self.speculative()

    @classmethod
    def from_arguments(cls, **values: Any) -> EngineConfig:
        """Build from keyword values. Raises ConfigError with a suggestion for an unknown one."""
        known = {f.name for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"unknown engine argument {key!r}", suggest(key, known))
        return cls(**values)

    def speculative(self) -> SpeculativeConfig | None:
        """Return the speculative settings, merged from their three arguments; None if speculation is off."""
        if self.use_speculative_decoding is False:
            return None
        return SpeculativeConfig.from_mapping(
            self.speculative_config or {}, model=self.draft_model, num_speculative_tokens=self.spec_length
        )

    def kv_memory_bytes(self) -> int | None:
        """Return kv_memory as a number of bytes; None = chosen from the free memory."""
        return None if self.kv_memory in (None, "auto") else read_bytes("kv_memory", self.kv_memory)

    def prompt_cache_folder(self) -> Path | None:
        """Return the folder for prompts; None = they are not kept."""
        return None if self.prompt_cache is None else read_folder("prompt_cache", self.prompt_cache)

    def learn_folder(self) -> Path | None:
        """Return the folder for what drafters learn; None = it is not kept."""
        return None if self.learn is None else read_folder("learn", self.learn)

    def prompt_cache_bytes(self) -> int:
        """Return prompt_cache_size as a number of bytes."""
        return read_bytes("prompt_cache_size", self.prompt_cache_size)

    def weight_cache_folder(self) -> Path | None:
        """Return the folder for packed weights; None = they are not kept."""
        if self.weight_cache in (False, "off"):
            return None
        own = self.weight_cache not in (True, "auto")
        return Path(str(self.weight_cache)).expanduser() if own else cache_folder("weights")

    @property
    def draft_model_backend(self) -> str:
        """The backend of a draft model: that of the speculative config, else the target's."""
        spec = self.speculative()
        return (spec.model_backend if spec else None) or self.model_backend

    @property
    def names_speculation(self) -> bool:
        """Whether the user requests speculation explicitly, instead of leaving it to the default."""
        return bool(self.use_speculative_decoding or self.draft_model or self.spec_length or self.speculative_config)


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted and verified. options: the method's own keys.

    method: None = `fallback`, or `draft_model` if a model is given with a length, options, or a policy other than
    `adaptive`; a head in the target's folder takes the model's place. num_speculative_tokens: None = the policy's
    choice, or the method's default length for the policy `fixed`. verification: "auto" chooses per request
    (engine/runner.py). draft_length: the name of a policy, or a mapping with the key `policy` and the policy's own
    keys; None = `fixed` if num_speculative_tokens is set, otherwise `adaptive`. methods: additional methods that
    requests may name. use_heterogeneous_vocab: whether a draft model may have another tokenizer than the target; None =
    it may. model_backend: of the draft model, see `EngineConfig`; None = the target's.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    verification: str = "auto"
    draft_length: str | Mapping[str, Any] | None = None
    methods: Sequence[str] = ()
    use_heterogeneous_vocab: bool | None = None
    model_backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, _SPECULATIVE_CHECKS)

    @property
    def policy(self) -> Mapping[str, Any]:
        """The draft-length policy: the key `policy` and its own keys."""
        if isinstance(self.draft_length, Mapping):
            return {"policy": "fixed", **self.draft_length}
        return {"policy": self.draft_length or ("fixed" if self.num_speculative_tokens is not None else DEFAULT_POLICY)}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], **elsewhere: Any) -> SpeculativeConfig:
        """Build from a mapping. elsewhere: the same keys from other arguments; None = not given."""
        own = {f.name for f in dataclasses.fields(cls)} - {"options"}
        merged = {key: value for key, value in values.items() if key in own}
        for key, value in elsewhere.items():
            if value is not None and merged.get(key, value) != value:
                raise ConfigError(
                    f"{key} is given twice, as {value!r} and as {merged[key]!r} in speculative_config", "keep one."
                )
            merged[key] = merged.get(key, value)
        return cls(**merged, options={key: value for key, value in values.items() if key not in own})


@dataclass(frozen=True)
class Limits:
    """The resolved limits of an engine."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 1024
    scheduling_policy: str = "decode-first"
    max_logprobs: int = MAX_LOGPROBS

    @property
    def max_source_len(self) -> int:
        """The most tokens of a source: a pass encodes all of them, and leaves a row for each other sequence."""
        return max(0, min(self.max_model_len, self.max_num_batched_tokens - self.max_num_seqs + 1))


def resolve(config: EngineConfig, max_positions: int, has_source: bool = False) -> Limits:
    """Turn missing sizes into values for a model of at most `max_positions` positions.

    has_source: it is an encoder-decoder model. Without a configured context the model's maximum is used, which the
    available memory may lower (engine/memory.py).
    """
    if config.max_model_len is not None and config.max_model_len > max_positions:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the {max_positions} positions of the model",
            f"use at most {max_positions}.",
        )
    longest = config.max_model_len or max_positions
    usual = max(USUAL_ROWS, min(longest, USUAL_CONTEXT) + config.max_num_seqs - 1) if has_source else USUAL_ROWS
    return Limits(
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or usual,
        max_waiting=config.max_waiting,
        scheduling_policy=config.scheduling_policy,
        max_logprobs=config.max_logprobs,
    )


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def read_bytes(name: str, value: object) -> int:
    """Read a size: a number of bytes, or text such as "512MiB" or "1.5 GB"."""
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and not isinstance(value, bool) else 0
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(f"{name}={value!r} is not a size", 'use bytes, or text such as "512MiB" or "2GB".')
    return size


def read_folder(name: str, value: object) -> Path:
    """Return the path of a folder, which may not exist yet. Raises ConfigError if there can't be one."""
    try:
        path = Path(str(value)).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{name}={str(value)!r}: no user of this name is known", "write the whole path.") from error
    there = next((each for each in (path, *path.parents) if os.path.exists(each)), path)
    if not str(value) or not there.is_dir():
        reason = f"{there} is a file" if str(value) else "the name is empty"
        raise ConfigError(f"{name}={str(value)!r} is no folder: {reason}", "name another.")
    return path


def read_cache_dtype(given: object) -> str:
    """Return the name of a type of keys and values; None is "auto". A torch type is read by its name.

    Raises ConfigError.
    """
    name = "auto" if given is None else str(given).removeprefix("torch.")
    if name.startswith(("fp8", "float8")):
        raise ConfigError(
            f"kv_cache_dtype={name!r} is not supported: keys and values are not stored in 8-bit floating point",
            'use kv_cache_dtype="int8", which takes about as many bytes, and has a scale for each head and token.',
        )
    one_of(CACHE_TYPES)("kv_cache_dtype", name)
    return name


def _read_dtype(given: object) -> str:
    """Return the name of a type, which may be torch's. float32 represents every number of float16."""
    name = str(given).removeprefix("torch.")
    if name in DTYPE_NAMES and name != "float":
        logger.info(
            "dtype %s is computed in float32, which represents the same numbers; bfloat16 needs half the memory", name
        )
    return DTYPE_NAMES.get(name, name)


def _check_weight_cache(name: str, value: object) -> None:
    if not isinstance(value, bool):
        check_place(name, value)


def _check_length(name: str, value: Any) -> None:
    check_positive(name, value)
    if value > MAX_SPECULATIVE_TOKENS:
        raise ConfigError(f"{name}={value} is more than a draft may have", f"use at most {MAX_SPECULATIVE_TOKENS}.")


def _check_methods(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name}={value!r} is not a list", 'use for example ["ngram"].')
    for method in value:
        check_name(name, method)


def _has_text_keys(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


_NO_MAPPING = "is not a mapping whose keys are text"
_ENGINE_CHECKS: Mapping[str, Check] = dict(
    model=check_place,
    draft_model=optional(check_place),
    tokenizer=optional(check_place),
    revision=optional(check_place),
    tokenizer_revision=optional(check_place),
    download_dir=optional(check_place),
    learn=optional(check_place),
    speculative_config=optional(kind(_has_text_keys, _NO_MAPPING, 'use for example {"method": ...}.')),
    dtype=one_of(DTYPES),
    kv_cache_backend=one_of(CACHES),
    weight_packing=one_of(PACKINGS),
    model_backend=one_of(MODEL_BACKENDS),
    scheduling_policy=one_of(POLICIES),
    weight_cache=_check_weight_cache,
    prompt_cache=optional(check_place),
    enable_prefix_caching=check_flag,
    measure=check_flag,
    find_drafts=check_flag,
    use_speculative_decoding=optional(check_flag),
    max_num_seqs=check_positive,
    block_size=check_positive,
    max_waiting=check_positive,
    max_model_len=optional(check_positive),
    max_num_batched_tokens=optional(check_positive),
    spec_length=optional(_check_length),
    max_logprobs=kind(
        lambda count: is_whole(count) and count >= -1,
        "is not a number of tokens",
        "set it to 0 or more, or -1 for all.",
    ),
    seed=optional(check_whole),
)
_SPECULATIVE_CHECKS: Mapping[str, Check] = dict(
    method=optional(check_name),
    model=optional(check_place),
    num_speculative_tokens=optional(_check_length),
    verification=check_name,
    draft_length=optional(
        kind(lambda value: isinstance(value, str) or _has_text_keys(value), _NO_MAPPING, 'use for example "fixed".')
    ),
    methods=_check_methods,
    use_heterogeneous_vocab=optional(check_flag),
    model_backend=optional(one_of(MODEL_BACKENDS)),
)
