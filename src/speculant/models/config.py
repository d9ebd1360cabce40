"""The shape of a decoder, as far as the families here differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speculant.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, and a scaling by `kind` with the checkpoint's own numbers."""

    theta: float
    kind: str = "default"  # default, linear, dynamic, llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides a decoder's arithmetic."""

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


def read_decoder(hf: Mapping[str, Any], **family: Any) -> DecoderConfig:
    """Read what all families share from a Hugging Face config; `family` adds or replaces what is a family's own."""
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(
            f"config.json asks for hidden_act={hf['hidden_act']!r}; only 'silu' is implemented",
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
        "head_dim": count(hf, "head_dim", count(hf, "hidden_size") // heads),
        "norm_eps": hf.get("rms_norm_eps", 1e-6),
        "max_positions": max_positions,
        "rope": read_rope(hf, max_positions),
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "windows": (None,) * layers,
    }
    return DecoderConfig(**{**shared, **family})


def count(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive whole number of the config; `default` stands in for an absent or null entry."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"config.json has no {key!r}", "the checkpoint is incomplete; download it again.")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json has {key} = {value!r}, not a positive whole number", "correct config.json.")
    return value


_ROPE_KINDS = ("default", "linear", "dynamic", "llama3")


def read_rope(hf: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Read the rotary settings, in the old form (rope_theta, rope_scaling) or the new (rope_parameters)."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    partial = scaling.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if kind not in _ROPE_KINDS or partial not in (None, 1.0) or any(isinstance(v, dict) for v in scaling.values()):
        raise ModelError(
            f"config.json asks for rotary settings that are not implemented: {scaling}, over {partial} of each head",
            f"use a checkpoint with one rope_type for all layers ({', '.join(_ROPE_KINDS)}) over whole heads.",
        )
    theta = scaling.get("rope_theta", hf.get("rope_theta"))
    return RopeConfig(
        theta=10000.0 if theta is None else float(theta),
        kind=kind,
        original_max_positions=_original_positions(hf, scaling, kind) or max_positions,
        **_rope_factors(scaling, kind),
    )


def _original_positions(hf: Mapping[str, Any], scaling: Mapping[str, Any], kind: str) -> int | None:
    """Return the length a llama3 scaling starts from; dynamic scaling starts from the context itself."""
    key = "original_max_position_embeddings"
    return hf.get(key) or scaling.get(key) if kind == "llama3" else None


def _rope_factors(scaling: Mapping[str, Any], kind: str) -> dict[str, float]:
    names = {"linear": ("factor",), "dynamic": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    missing = [name for name in names.get(kind, ()) if not isinstance(scaling.get(name), int | float)]
    if missing:
        raise ModelError(f"config.json has rope scaling {kind!r} without {', '.join(missing)}", "correct config.json.")
    return {name: float(scaling[name]) for name in names.get(kind, ())}


def read_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Read Qwen's windows: by layer_types, else for the layers from max_window_layers on."""
    layers = count(hf, "num_hidden_layers")
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    if window is None:
        return (None,) * layers
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
