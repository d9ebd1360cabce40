"""The configuration of a decoder: everything in which the supported families differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from speculant.errors import ModelError
from speculant.models.fields import count as count
from speculant.models.fields import flag, is_whole, number, show, window

MOST_HEAD_DIM = 2**16
MOST_WEIGHTS = 2**40  # in one matrix; no machine holds more
MOST_THETA, MOST_FACTOR = 1e30, 1e6  # far above those of any checkpoint, and finite in float32


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and a scaling by `kind` with the checkpoint's factors."""

    theta: float
    kind: str = "default"  # default, linear, dynamic, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that determines a decoder's arithmetic.

    head_tokens: the ascending ids of the head's rows, see `with_short_head`; () = all. Others have the logit -inf.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]  # sliding window per layer; None = full attention
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json has {self.num_heads} attention heads, not a multiple of {self.num_kv_heads} key heads",
                "check num_attention_heads and num_key_value_heads in config.json.",
            )
        if self.head_dim % 2:
            raise ModelError(
                f"config.json gives heads of {self.head_dim} dimensions, which can't be rotated in pairs",
                "check head_dim, hidden_size and num_attention_heads in config.json.",
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"config.json has {len(self.windows)} layer_types for {self.num_layers} layers",
                "check layer_types and num_hidden_layers in config.json.",
            )
        if self.rope.kind == "dynamic" and self.head_dim == 2:
            raise ModelError(
                "config.json asks for dynamic rope scaling of heads of 2 dimensions, for which it is not defined",
                "check rope_scaling and head_dim in config.json.",
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Refuse matrices whose sizes could overflow, before their files are opened."""
        heads = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        largest = max(heads, self.intermediate_size, self.vocab_size) * self.hidden_size
        if largest > MOST_WEIGHTS:
            raise ModelError(
                f"config.json describes a matrix of {largest} weights, more than {MOST_WEIGHTS}",
                "check vocab_size, hidden_size, intermediate_size, head_dim and the numbers of heads in config.json.",
            )


def read_decoder(hf: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Read the fields that all families share from a Hugging Face config; `family` adds or replaces fields."""
    if hf.get("hidden_act") not in (None, "silu", "swish"):
        raise ModelError(
            f"config.json asks for hidden_act={show(hf['hidden_act'])}; only 'silu' is implemented",
            "use a checkpoint of one of the supported families.",
        )
    heads = count(hf, "num_attention_heads")
    layers = count(hf, "num_hidden_layers")
    max_positions = count(hf, "max_position_embeddings")
    shared = {
        "model_type": hf["model_type"],
        "vocab_size": count(hf, "vocab_size"),
        "hidden_size": count(hf, "hidden_size"),
        "intermediate_size": count(hf, "intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": count(hf, "num_key_value_heads", heads),
        "head_dim": count(hf, "head_dim", count(hf, "hidden_size") // heads, MOST_HEAD_DIM),
        "norm_eps": number(hf, "rms_norm_eps", 1e-6, 1e-30, 1),
        "max_positions": max_positions,
        "rope": read_rope(hf, max_positions),
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "windows": (None,) * layers,
    }
    return DecoderConfig(**{**shared, **family})


_ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


def read_rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read the rotary settings, in the old form (rope_theta, rope_scaling) or the new (rope_parameters).

    With both, rope_scaling replaces rope_parameters, as in transformers 5.
    """
    scaling = _rope_settings(hf)
    kind = _first((scaling.get("rope_type"), scaling.get("type"), "default"))
    partial = _first((scaling.get("partial_rotary_factor"), hf.get("partial_rotary_factor"), 1.0))
    if kind not in _ROPE_KINDS or partial != 1.0 or any(isinstance(v, dict) for v in scaling.values()):
        raise ModelError(
            "config.json asks for rotary settings that are not implemented:"
            f" {show(scaling)}, over {show(partial)} of each head",
            f"use a checkpoint with one rope_type for all layers ({', '.join(_ROPE_KINDS)}) over whole heads.",
        )
    return RopeConfig(
        theta=number(
            scaling if scaling.get("rope_theta") is not None else hf, "rope_theta", 10000.0, 1 / MOST_THETA, MOST_THETA
        ),
        kind=kind,
        original_max_positions=_original_positions(hf, scaling, max_positions) if kind == "llama3" else max_positions,
        **_rope_factors(scaling, kind),
    )


def _first(values: Iterable[Any]) -> Any:
    """Return the first value that is not null."""
    return next(value for value in values if value is not None)


def _rope_settings(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {key: hf.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if value is not None and not isinstance(value, dict):
            raise ModelError(f"config.json has {key} = {show(value)}, not an object", "correct config.json.")
    return given["rope_scaling"] or given["rope_parameters"] or {}


def _original_positions(hf: Mapping[str, Any], scaling: Mapping[str, Any], max_positions: int) -> int:
    """Return the context length before llama3 scaling."""
    key = "original_max_position_embeddings"
    return count(hf if hf.get(key) is not None else scaling, key, max_positions)


def _rope_factors(scaling: Mapping[str, Any], kind: str) -> dict[str, float]:
    names = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    missing = [name for name in names.get(kind, ()) if scaling.get(name) is None]
    if missing:
        raise ModelError(f"config.json has rope scaling {kind!r} without {', '.join(missing)}", "correct config.json.")
    factors = {name: number(scaling, name, None, 1 / MOST_FACTOR, MOST_FACTOR) for name in names.get(kind, ())}
    if kind == "llama3" and factors["low_freq_factor"] >= factors["high_freq_factor"]:
        raise ModelError(
            f"config.json has low_freq_factor = {factors['low_freq_factor']:g}, not below"
            f" high_freq_factor = {factors['high_freq_factor']:g}",
            "correct config.json.",
        )
    return factors


_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read Qwen's windows: by layer_types, else for the layers from max_window_layers on."""
    layers = count(hf, "num_hidden_layers")
    size = window(hf) if flag(hf, "use_sliding_window") else None
    if size is None:
        return (None,) * layers
    kinds = hf.get("layer_types")
    if kinds is None or kinds == []:
        first = _first_window(hf)
        return (None,) * min(first, layers) + (size,) * max(layers - first, 0)
    if not isinstance(kinds, list) or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ModelError(
            f"config.json has layer_types = {show(kinds)}",
            f"list one of these for each layer: {', '.join(_LAYER_TYPES)}.",
        )
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _first_window(hf: Mapping[str, Any]) -> int:
    first = hf.get("max_window_layers", 28)
    if not is_whole(first) or first < 0:
        raise ModelError(f"config.json has max_window_layers = {show(first)}, not a whole number", "correct it.")
    return int(first)
