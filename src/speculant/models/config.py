"""Reads the parts of a decoder from a Hugging Face config.json, as far as families share them.

Each reader checks its entries. A wrong one raises a ModelError that names it.

Scalings of rotary positions whose angles do not depend on the length of the text become factors: the divisor of each
pair's frequency. They are exact: frequencies are computed in float32, and a factor is the quotient of two of them in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.models.description import (
    SAME_NAMES,
    Attention,
    DecoderConfig,
    Embedding,
    Encoder,
    Experts,
    Head,
    Layer,
    Mlp,
    Norm,
    Rope,
    TensorMap,
)
from speculant.models.functions import log_of, powers
from speculant.models.positions import plain_frequencies

MOST = 2**31 - 1  # sizes are int32 in kernels and files
MOST_HEAD_DIM, MOST_LAYERS = 2**16, 10_000
MOST_EXPERTS = 2**12  # of a layer; each has tensors of its own
MOST_THETA, MOST_FACTOR = 1e30, 1e6  # far above those of any checkpoint, and finite in float32
POSITIVE = (1e-12, 1e12)  # bounds of scales and caps
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # layer types
MOST_SHOWN = 300  # characters of a value in an error message
_SHARED = (
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)  # entries outside of `text_config` that hold for the language model


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the language model: all, or `text_config` in the config.json of one that reads images."""
    inner = hf.get("text_config")
    if not isinstance(inner, dict) or "model_type" not in inner:
        return dict(hf)
    return {**{key: hf[key] for key in _SHARED if hf.get(key) is not None}, **inner}


def show(value: Any) -> str:
    """Return the text of a value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """Return the first names for an error message, and how many more there are."""
    more = f"{separator}and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


def count(hf: Mapping[str, Any], key: str, default: int | None = None, most: int = MOST, least: int = 1) -> int:
    """Return a whole number from `least` to `most`; `default` replaces an absent or null entry."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key!r}", "the checkpoint is incomplete; download it again.")
    if not is_whole(value) or not least <= value <= most:
        raise _wrong(key, value, f"a {'positive ' if least else ''}whole number up to {most}")
    return int(value)


def number(hf: Mapping[str, Any], key: str, default: float | None, least: float, most: float) -> float:
    """Return a number from `least` to `most`; `default` replaces an absent or null entry."""
    value = hf.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _wrong(key, value, f"a number from {least:g} to {most:g}")
    return float(value)


def optional_number(hf: Mapping[str, Any], key: str) -> float | None:
    """Return a positive number; None for an absent or null entry."""
    return None if hf.get(key) is None else number(hf, key, None, *POSITIVE)


def flag(hf: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return a truth value; `default` replaces an absent or null entry."""
    value = default if hf.get(key) is None else hf[key]
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return bool(value)


def whole_numbers(hf: Mapping[str, Any], key: str) -> list[int]:
    """Return a list of whole numbers; an absent or null entry is empty."""
    value = hf.get(key)
    if value is not None and not (isinstance(value, list) and all(map(is_whole, value))):
        raise _wrong(key, value, "a list of whole numbers")
    return value or []


def filled(hf: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return all entries, with these defaults for those that are absent or null."""
    return {**hf, **{key: value for key, value in defaults.items() if hf.get(key) is None}}


def check_unset(hf: Mapping[str, Any], *keys: str) -> None:
    """Raise ModelError if one of these entries is set: it asks for arithmetic that is not implemented."""
    for key in keys:
        if hf.get(key):
            raise ModelError(
                f"config.json has {key} = {show(hf[key])}, which is not implemented",
                "use a checkpoint without it, or another engine.",
            )


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(key: str, value: Any, expected: str) -> ModelError:
    return ModelError(f"config.json has {key} = {show(value)}, not {expected}", "correct config.json.")


_ORIGINAL = "original_max_position_embeddings"
_EXTENDED = "a context times the factor of rope_scaling"
_KNOWN = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL, "max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta"),
        *("factors", "long_factors", "dims"),  # of heads that were trained here
        *("mrope_section", "mrope_interleaved"),  # for images: in texts, all axes have the same position
        "finetuned",
    }
)
_OTHER = "use a checkpoint of one of the supported families."
_CORRECT = "correct config.json."


def read_rope(
    hf: Mapping[str, Any],
    max_positions: int,
    layer_type: str | None = None,
    *,
    theta: float = 10000.0,
    share: float | None = None,
    head_dim: int | None = None,
) -> Rope:
    """Read the rotary settings, in the old form (rope_theta, rope_scaling) or the new (rope_parameters).

    With both, rope_scaling replaces rope_parameters, as in transformers 5. max_positions: the trained context.
    layer_type: full_attention or sliding_attention, if their settings differ; rope_scaling then belongs to
    full_attention. theta: the family's base, for a config.json without one. share: the share of each head that is
    rotated if config.json does not say; None = always the whole head. head_dim: of these layers; None = as in
    config.json.

    Raises ModelError for an entry that is wrong, missing or not known.
    """
    settings = _settings(hf, layer_type)
    unknown = sorted(key for key in settings.keys() - _KNOWN if settings[key] is not None)
    if unknown or any(isinstance(value, dict) for value in settings.values()):
        names = unknown or [key for key, value in settings.items() if isinstance(value, dict)]
        raise ModelError(
            f"config.json has rotary settings that are not implemented: {', '.join(map(show, names))}", _OTHER
        )
    kind = _first((settings.get("rope_type"), settings.get("type"), "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ModelError(
            f"config.json asks for rotary settings that are not implemented: {show(settings)}",
            f"use a checkpoint with one of these rope_types: {', '.join(_KINDS)}.",
        )
    if share is None and kind != "proportional":
        _check_whole(hf, settings)
    return _Reader(
        hf, settings, _theta(hf, settings, layer_type, theta), max_positions, layer_type, head_dim, share
    ).read(kind)


def longest_context(hf: Mapping[str, Any], by_kind: bool = False) -> int:
    """Return how many positions a model with rotary positions has: a scaling extends the stated ones.

    yarn: the original context times the factor, if that is more. linear: the stated context times the factor. With
    other kinds the extended context is stated. by_kind: whether each kind of layers has settings of its own; such
    models, as Gemma 3, state the context that linear factors extend.
    """
    stated = count(hf, "max_position_embeddings")
    scaling, parameters = (_object(hf, key) for key in ("rope_scaling", "rope_parameters"))
    of_kinds = [each for each in parameters.values() if isinstance(each, dict)]
    longest = stated
    for each in (*of_kinds, scaling) if of_kinds else (scaling or parameters,):
        kind = each.get("rope_type") or each.get("type")
        if each.get("factor") is None or kind not in (("yarn",) if by_kind else ("yarn", "linear")):
            continue
        original = (None if of_kinds else hf.get(_ORIGINAL)) or each.get(_ORIGINAL)
        first = count({_ORIGINAL: original if kind == "yarn" else None}, _ORIGINAL, stated)
        longest = max(longest, int(first * number(each, "factor", None, 1 / MOST_FACTOR, MOST_FACTOR)))
    return count({_EXTENDED: longest}, _EXTENDED)


@dataclass(frozen=True)
class _Scaled:
    """The frequencies of pairs [dims / 2], and the factor of cosines and sines. long: those of long texts."""

    frequencies: Tensor
    scale: float = 1.0
    long: Tensor | None = None


@dataclass(frozen=True)
class _Reader:
    """The settings of one kind of layers; see `read_rope`."""

    hf: Mapping[str, Any]
    settings: Mapping[str, Any]
    theta: float
    max_positions: int
    layer_type: str | None
    given_head_dim: int | None
    share: float | None

    def read(self, kind: str) -> Rope:
        """Return the rotary positions of a kind."""
        beta, scale, dims = number(self.settings, "llama_4_scaling_beta", 0.0, 0, MOST_FACTOR), 1.0, None
        factors: tuple[float, ...] = ()
        long: tuple[float, ...] = ()
        if kind == "dynamic":
            self.need("factor")
            return Rope(self.theta, kind, self.factor, self.max_positions, dims=self.rotated)
        if kind == "factors":  # of a head that was trained here; see `rope_entries`
            factors, long, dims = self.optional_list("factors"), self.optional_list("long_factors"), self.rotated
            scale = number(self.settings, "attention_factor", 1.0, 0, MOST_FACTOR)
        elif kind != "default" or self.share is not None:  # else it needs no head_dim, which may be unknown
            made = _KINDS[kind](self)
            factors, long = self._divisors(made.frequencies), self._divisors(made.long)
            pairs, scale = len(factors), made.scale
            long = () if long == factors else long
            factors = () if not long and all(each == 1 for each in factors) else factors
            dims = None if 2 * pairs == self.head_dim else 2 * pairs
        return Rope(
            self.theta,
            kind="factors" if factors else "default",
            factors=factors,
            long_factors=long,
            original_max_positions=self.original if long or beta else 0,
            dims=dims,
            scale=scale,
            query_beta=beta,
        )

    def default(self) -> _Scaled:
        """Return frequencies that are not scaled."""
        return _Scaled(self.plain)

    def linear(self) -> _Scaled:
        """Return frequencies divided by one factor."""
        self.need("factor")
        return _Scaled(self.plain / self.factor)

    def llama3(self) -> _Scaled:
        """Keep short wavelengths, divide long ones by the factor, blend in between (Llama 3.1)."""
        self.need("factor", "low_freq_factor", "high_freq_factor")
        low, high = self.positive("low_freq_factor"), self.positive("high_freq_factor")
        if low >= high:
            raise ModelError(
                f"config.json has low_freq_factor = {low:g}, not below high_freq_factor = {high:g}", _CORRECT
            )
        plain, original = self.plain, self.original
        wavelengths = 2 * math.pi / plain
        blend = (original / wavelengths - low) / (high - low)
        scaled = torch.where(wavelengths > original / low, plain / self.factor, plain)
        is_between = (wavelengths >= original / high) & (wavelengths <= original / low)
        return _Scaled(torch.where(is_between, (1 - blend) * scaled / self.factor + blend * scaled, scaled))

    def yarn(self) -> _Scaled:
        """Divide the frequencies of slowly turning pairs by the factor (YaRN, arXiv 2309.00071)."""
        original, dims = self.original, self.dims
        factor = self.positive("factor", self.max_positions / original)
        if self.theta <= 1:
            raise ModelError(f"config.json has rope_theta = {self.theta:g}, and YaRN needs more than 1", _CORRECT)

        def pair_that_turns(turns: float) -> float:
            """Return the index of the pair that makes `turns` full turns within the original context."""
            return (dims * log_of(original / (turns * 2 * math.pi))) / (2 * log_of(self.theta))

        low, high = pair_that_turns(self.positive("beta_fast", 32)), pair_that_turns(self.positive("beta_slow", 1))
        if self.is_truncated():
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        high += 0.001 if low == high else 0
        ramp = ((torch.arange(len(self.plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        divisors = powers(self.theta, torch.arange(0, dims, 2).float() / dims).float()
        kept = 1 - ramp
        return _Scaled(1.0 / (factor * divisors) * (1 - kept) + 1.0 / divisors * kept, self.yarn_scale(factor))

    def is_truncated(self) -> bool:
        """Whether YaRN's bounds are whole pairs. transformers reads this beside the settings of all kinds of layers."""
        settings = self.settings if self.layer_type is None else (self.hf.get("rope_parameters") or {})
        return settings.get("truncate") is None or flag(settings, "truncate")

    def yarn_scale(self, factor: float) -> float:
        """Return YaRN's factor of cosines and sines."""

        def growth(weight: float) -> float:
            return 0.1 * weight * log_of(factor) + 1.0 if factor > 1 else 1.0

        own, whole = (number(self.settings, key, 0.0, 0, MOST_FACTOR) for key in ("mscale", "mscale_all_dim"))
        return self.positive("attention_factor", growth(own) / growth(whole) if own and whole else growth(1.0))

    def longrope(self) -> _Scaled:
        """Return frequencies for texts up to the original context, and for longer ones (LongRoPE, arXiv 2402.13753)."""
        self.need("short_factor", "long_factor")
        original, exponents = self.original, torch.arange(0, self.dims, 2).float() / self.dims
        factor = self.positive("factor", self.max_positions / original)
        grown = math.sqrt(1 + log_of(factor) / log_of(original)) if factor > 1 < original else 1.0
        scale = self.positive("attention_factor", grown)
        short, long = (self.list_of(key, len(exponents)) for key in ("short_factor", "long_factor"))
        divisors = powers(self.theta, exponents).float()
        made = [1.0 / (torch.tensor(factors) * divisors) for factors in (short, long)]
        return _Scaled(made[0], scale, made[1])

    def proportional(self) -> _Scaled:
        """Return frequencies for the whole head. The last ones are 0: these pairs are not rotated."""
        share = number(self.settings, "partial_rotary_factor", 1.0, 0, 1)
        rotated = int(share * self.head_dim // 2)
        divisors = powers(self.theta, torch.arange(0, 2 * rotated, 2).float() / self.head_dim).float()
        still = torch.zeros(self.head_dim // 2 - rotated)
        return _Scaled(torch.cat((1.0 / divisors, still)) / self.positive("factor", 1.0))

    @property
    def head_dim(self) -> int:
        """The dimensions of a head."""
        if self.given_head_dim is not None:
            return self.given_head_dim
        width = self.hf.get("head_dim") or count(self.hf, "hidden_size") // count(self.hf, "num_attention_heads")
        return count({"head_dim": width}, "head_dim", most=MOST_HEAD_DIM)

    @property
    def dims(self) -> int:
        """How many dimensions of a head have frequencies; an odd number is rounded up to pairs."""
        share = _share(self.hf, self.settings, self.share)
        dims = int(self.head_dim * share)
        if not 1 <= dims <= self.head_dim or (self.head_dim % 2 and dims == self.head_dim):
            raise ModelError(
                f"config.json rotates {show(share)} of heads of {self.head_dim} dimensions, which can't be rotated in"
                " pairs",
                "check head_dim, hidden_size, num_attention_heads and the rotary settings in config.json.",
            )
        return dims

    @property
    def rotated(self) -> int | None:
        """The rotated dimensions of a head; None = all."""
        if self.settings.get("dims") is not None:
            return count(self.settings, "dims", most=MOST_HEAD_DIM)
        return None if self.share is None or self.dims == self.head_dim else self.dims

    @property
    def plain(self) -> Tensor:
        """Frequencies that are not scaled."""
        return plain_frequencies(self.theta, self.dims)

    @property
    def factor(self) -> float:
        """The entry `factor`."""
        return self.positive("factor")

    @property
    def original(self) -> int:
        """The context length before scaling. An entry outside the settings goes first, unless layer types differ."""
        beside = self.layer_type is None and self.hf.get(_ORIGINAL) is not None
        return count(self.hf if beside else self.settings, _ORIGINAL, self.max_positions)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a positive number. As in transformers, 0 in some entries stands for their default."""
        value = self.settings.get(key)
        absent = value is None or (value == 0 and not isinstance(value, bool) and key in ("beta_fast", "beta_slow"))
        return (
            float(default)
            if absent and default is not None
            else number(self.settings, key, None, 1 / MOST_FACTOR, MOST_FACTOR)
        )

    def need(self, *keys: str) -> None:
        """Check that entries are there."""
        missing = [key for key in keys if self.settings.get(key) is None]
        if missing:
            kind = _first((self.settings.get("rope_type"), self.settings.get("type")))
            raise ModelError(f"config.json has rope scaling {show(kind)} without {', '.join(missing)}", _CORRECT)

    def list_of(self, key: str, pairs: int | None = None) -> tuple[float, ...]:
        """Return a factor for each pair; null = the pair is not rotated."""
        given = self.settings.get(key)
        if not isinstance(given, list) or not given or pairs not in (None, len(given)):
            of = "" if pairs is None else f" of {pairs}, one for each pair of dimensions that are rotated"
            raise ModelError(f"config.json has rope scaling {key!r} = {show(given)}, not a list{of}", _CORRECT)
        return tuple(
            math.inf if each is None else number({key: each}, key, None, 1 / MOST_FACTOR, MOST_FACTOR) for each in given
        )

    def optional_list(self, key: str) -> tuple[float, ...]:
        """Return `list_of`; () for an absent entry."""
        return () if self.settings.get(key) is None else self.list_of(key)

    def _divisors(self, frequencies: Tensor | None) -> tuple[float, ...]:
        """Return the factors of frequencies, so that dividing by them in float64 gives the same float32 numbers."""
        return (
            ()
            if frequencies is None
            else tuple((plain_frequencies(self.theta, 2 * len(frequencies)).double() / frequencies.double()).tolist())
        )


_KINDS = {
    "default": _Reader.default,
    "linear": _Reader.linear,
    "dynamic": _Reader.default,
    "llama3": _Reader.llama3,
    "yarn": _Reader.yarn,
    "longrope": _Reader.longrope,
    "su": _Reader.longrope,  # its first name
    "proportional": _Reader.proportional,
    "factors": _Reader.default,
}


def rope_entries(rope: Rope) -> dict[str, Any]:
    """Return the entries of config.json from which `read_rope` makes these rotary positions again."""
    if rope == Rope(rope.theta):
        return {"rope_theta": rope.theta}
    if rope.kind == "dynamic":
        dynamic = {"rope_type": "dynamic", "factor": rope.factor, "dims": rope.dims}
        return {"rope_theta": rope.theta, "rope_scaling": dynamic}
    own: dict[str, Any] = {"rope_type": "factors"}
    if rope.dims is not None or not rope.factors:
        own["dims"] = rope.dims
    for key in ("factors", "long_factors"):
        if getattr(rope, key):
            own[key] = [None if math.isinf(each) else each for each in getattr(rope, key)]
    if rope.scale != 1:
        own["attention_factor"] = rope.scale
    if rope.query_beta:
        own["llama_4_scaling_beta"] = rope.query_beta
    if rope.original_max_positions:
        own[_ORIGINAL] = rope.original_max_positions
    return {"rope_theta": rope.theta, "rope_scaling": own}


def _first(values: Iterable[Any]) -> Any:
    """Return the first value that is not null."""
    return next(value for value in values if value is not None)


def _settings(hf: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """Return the settings of one kind of layers, without null entries."""
    scaling, parameters = (_object(hf, key) for key in ("rope_scaling", "rope_parameters"))
    if layer_type is None:
        return scaling or parameters
    if parameters and not any(isinstance(value, dict) for value in parameters.values()):
        raise ModelError(
            f"config.json has rope_parameters = {show(parameters)}, not an object for each kind of layers", _CORRECT
        )
    return {**_object(parameters, layer_type), **(scaling if layer_type != SLIDING else {})}


def _object(of: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the entries of an object that are not null; none for an absent or null one."""
    value = of.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json has {key} = {show(value)}, not an object", _CORRECT)
    return {name: each for name, each in (value or {}).items() if each is not None}


def _theta(hf: Mapping[str, Any], settings: Mapping[str, Any], layer_type: str | None, default: float) -> float:
    """Read the base. Layers with a sliding window have their own if the kinds of layers differ."""
    keys = ("rope_local_base_freq",) if layer_type == SLIDING else ("rope_theta", "rotary_emb_base")
    given = {"rope_theta": settings.get("rope_theta")}
    key = "rope_theta"
    for other in keys:
        if given[key] is None and hf.get(other) is not None:
            given, key = {other: hf[other]}, other
    return number(given, key, default, 1 / MOST_THETA, MOST_THETA)


def _share(hf: Mapping[str, Any], settings: Mapping[str, Any], default: float | None) -> float:
    """Read the share of each head that is rotated."""
    key = "partial_rotary_factor"
    share = _first((settings.get(key), hf.get(key), hf.get("rotary_pct"), default, 1.0))
    return number({key: share}, key, None, 0, 1)


def _check_whole(hf: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    share = _share(hf, settings, None)
    if share != 1.0:
        raise ModelError(
            "config.json asks for rotary settings that are not implemented:"
            f" {show(settings)}, over {show(share)} of each head",
            "use a checkpoint of this family that rotates whole heads.",
        )


_Kind = TypeVar("_Kind", bound=Hashable)
MASK = "pard_token"  # key of config.json
ACTIVATION_NAMES = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"), "gelu_tanh"),
    "relu": "relu",
}  # by the names in config.json


def read_decoder(
    hf: Mapping[str, Any],
    layers: Sequence[Layer],
    tensors: TensorMap = SAME_NAMES,
    norm: Norm | None = None,
    embedding: Mapping[str, Any] = MappingProxyType({}),
    head: Mapping[str, Any] = MappingProxyType({}),
    encoder: Encoder | None = None,
    *,
    by_kind: bool = False,
) -> DecoderConfig:
    """Read the embedding, the last norm and the head of a decoder with these layers.

    tensors: the names in the files. norm: the one before the head; None = as `read_norm` reads it. embedding, head:
    other fields of these parts. by_kind: see `longest_context`.
    """
    if not any(layer.attention for layer in layers):
        raise ModelError(
            f"config.json describes {len(layers)} layers without attention",
            "check layer_types, and the numbers of layers and of those between two with attention, in config.json.",
        )
    rotates = any(layer.attention and layer.attention.rope for layer in layers)
    return DecoderConfig(
        embedding=Embedding(count(hf, "vocab_size"), count(hf, "hidden_size"), mask=_read_mask(hf), **embedding),
        layers=tuple(layers),
        norm=read_norm(hf) if norm is None else norm,
        head=Head(tied=flag(hf, "tie_word_embeddings"), **head),
        max_positions=longest_context(hf, by_kind) if rotates else count(hf, "max_position_embeddings"),
        tensors=tensors,
        encoder=encoder,
    )


def _read_mask(hf: Mapping[str, Any]) -> int | None:
    """Read the mask token of a model that drafts in one pass (PARD, arXiv 2504.18583); None = it is no such model."""
    token = hf.get(MASK)
    if token is not None and not (is_whole(token) and 0 <= token < count(hf, "vocab_size")):
        raise ModelError(
            f"config.json has {MASK}={show(token)}, which is no token of the model's {count(hf, 'vocab_size')}",
            f"check {MASK} and vocab_size in config.json.",
        )
    return token


def read_norm(hf: Mapping[str, Any], key: str = "rms_norm_eps", default: float = 1e-6, **own: Any) -> Norm:
    """Read the norm that all parts of a model use; `own` has the other fields."""
    return Norm(number(hf, key, default, 1e-30, 1), **own)


def read_mlp(hf: Mapping[str, Any], *, key: str = "hidden_act", size: str = "intermediate_size", **own: Any) -> Mlp:
    """Read the feed-forward block; `own` has the other fields. key, size: those of its activation and its width.

    Raises ModelError for an activation that is not implemented.
    """
    return Mlp(count(hf, size), activation=_read_activation(hf, key), **own)


def read_experts(hf: Mapping[str, Any], size: str = "intermediate_size", **own: Any) -> Experts:
    """Read a layer's experts; `own` has the other fields. size: the key of one expert's width.

    Raises ModelError for an activation that is not implemented.
    """
    named = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    return Experts(
        count(hf, named, most=MOST_EXPERTS), count(hf, "num_experts_per_tok"), count(hf, size),
        activation=_read_activation(hf, "hidden_act"), **own,
    )  # fmt: skip


def _read_activation(hf: Mapping[str, Any], key: str) -> str:
    name = hf.get(key) or "silu"
    if not isinstance(name, str) or name not in ACTIVATION_NAMES:
        raise ModelError(
            f"config.json asks for {key}={show(name)}; only {', '.join(ACTIVATION_NAMES)} are implemented",
            "use a checkpoint of one of the supported families.",
        )
    return ACTIVATION_NAMES[name]


def read_attention(hf: Mapping[str, Any], **own: Any) -> Attention:
    """Read the heads, and their rotary positions unless `own` has them; `own` has the other fields."""
    heads = count(hf, "num_attention_heads")
    if "rope" not in own:
        own["rope"] = read_rope(hf, count(hf, "max_position_embeddings"))
    return Attention(
        heads=heads,
        kv_heads=count(hf, "num_key_value_heads", heads),
        head_dim=count(hf, "head_dim", count(hf, "hidden_size") // heads, MOST_HEAD_DIM),
        **own,
    )


def windowed(layer: Layer, windows: Sequence[int | None]) -> list[Layer]:
    """Return a layer for each of these sliding windows, None = full attention; they differ in nothing else."""
    return layers_of(windows, lambda window: layer.attending(window=window))


def layers_of(kinds: Sequence[_Kind], make: Callable[[_Kind], Layer]) -> list[Layer]:
    """Return a layer of each of these kinds; layers of one kind are the same object."""
    made = {kind: make(kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


def count_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of layers."""
    return count(hf, "num_hidden_layers", most=MOST_LAYERS)


def read_layer_types(hf: Mapping[str, Any], full: Callable[[int], bool], other: str = SLIDING) -> list[str]:
    """Read the kind of each layer: full attention, or `other`.

    full: whether a layer has full attention if config.json does not list them.
    """
    layers, kinds = count_layers(hf), hf.get("layer_types")
    if kinds is None or kinds == []:
        return [FULL if full(index) else other for index in range(layers)]
    if not isinstance(kinds, list) or any(kind not in (FULL, other) for kind in kinds):
        raise ModelError(
            f"config.json has layer_types = {show(kinds)}",
            f"list one of these for each layer: {FULL}, {other}.",
        )
    if len(kinds) != layers:
        raise ModelError(
            f"config.json has {len(kinds)} layer_types for {layers} layers",
            "check layer_types and num_hidden_layers in config.json.",
        )
    return kinds


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read Qwen's windows: by layer_types, else for the layers from max_window_layers on."""
    size = window(hf) if flag(hf, "use_sliding_window") else None
    if size is None:
        return (None,) * count_layers(hf)
    first = 0 if hf.get("layer_types") else _first_window(hf)
    kinds = read_layer_types(hf, lambda index: index < first)
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _first_window(hf: Mapping[str, Any]) -> int:
    first = hf.get("max_window_layers", 28)
    if not is_whole(first) or first < 0:
        raise ModelError(f"config.json has max_window_layers = {show(first)}, not a whole number", "correct it.")
    return int(first)


def window(hf: Mapping[str, Any]) -> int | None:
    """Return the positions that `sliding_window` covers; null = all of them, absent = 4096."""
    return None if hf.get("sliding_window", 4096) is None else count(hf, "sliding_window", 4096)
