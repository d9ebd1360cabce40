"""The metadata that describes a model in a GGUF file, in the keys that llama.cpp's conversion writes.

Values are those of the description, so that a config.json may leave settings to its family. What has no key is left
out; `speculant.lab.quantize.check` refuses such a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from speculant.models import (
    FULL,
    DecoderConfig,
    Experts,
    Rope,
    read_generation,
    read_sampling,
    read_start_tokens,
    sampling_entries,
)

Config = Mapping[str, Any]
Entries = dict[str, Any]
_ORIGINAL = "original_max_position_embeddings"


def decoder_entries(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata that most families have."""
    of = decoder.attention
    return {
        "vocab_size": decoder.vocab_size,
        "block_count": decoder.num_layers,
        "context_length": decoder.max_positions,
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": decoder.layers[0].mlp.size,
        "attention.head_count": of.heads,
        "attention.head_count_kv": of.kv_heads,
        "attention.key_length": of.head_dim,
        "attention.value_length": of.head_dim,
        f"attention.layer_norm_{'rms_' if decoder.norm.kind == 'rms' else ''}epsilon": decoder.norm.eps,
        **_positions(config, decoder),
        **_windows(decoder),
        **_experts(config, decoder),
    }


def encoder_decoder_entries(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata of T5."""
    assert decoder.encoder is not None
    of, distances = decoder.attention, decoder.attention.distances
    assert distances is not None
    eps = decoder.norm.eps
    return {
        "context_length": config.get("n_positions") or 512,
        "embedding_length": decoder.hidden_size,
        "feed_forward_length": decoder.layers[0].mlp.size,
        "block_count": len(decoder.encoder.layers),
        "decoder_block_count": decoder.num_layers,
        "attention.head_count": of.heads,
        "attention.key_length": of.head_dim,
        "attention.value_length": of.head_dim,
        "attention.layer_norm_epsilon": eps,
        "attention.layer_norm_rms_epsilon": eps,
        "attention.relative_buckets_count": distances.buckets,
    }


def start_entries(folder: Path, config: Config, decoder: DecoderConfig) -> Entries:
    """Return the metadata for the token that a decoder's prompt begins with."""
    if decoder.encoder is None:
        return {}
    tokens = read_start_tokens(read_generation(folder), config, decoder.vocab_size)
    return {"decoder_start_token_id": tokens[0]} if tokens else {}


def sampled_entries(folder: Path) -> Entries:
    """Return the sampling settings that a folder recommends. Raises ModelError for one that is out of range."""
    generation = read_generation(folder)
    read_sampling(generation, folder)  # checks them
    return sampling_entries(generation)


def _windows(decoder: DecoderConfig) -> Entries:
    """Return the sliding window, and which layers have it: all but each n-th, or a list."""
    size = next((window for window in decoder.windows if window), None)
    if size is None:
        return {}
    slides = [window is not None for window in decoder.windows]
    periods = {n: [n == 0 or (index + 1) % n != 0 for index in range(len(slides))] for n in range(len(slides) + 1)}
    pattern = next((n for n, layers in periods.items() if layers == slides), slides)
    return {"attention.sliding_window": size, "attention.sliding_window_pattern": pattern}


def _experts(config: Config, decoder: DecoderConfig) -> Entries:
    experts = next((layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)), None)
    if experts is None:
        return {}
    found: Entries = {"expert_count": experts.count, "expert_used_count": experts.used}
    if "moe_intermediate_size" in config:
        dense = config.get("intermediate_size") or experts.size
        found |= {"expert_feed_forward_length": experts.size, "feed_forward_length": dense}
    return found


def _positions(config: Config, decoder: DecoderConfig) -> Entries:
    """Return the rotary positions: those of layers without a window, and the base of the others."""
    rope, rotated = _rope(decoder)
    if rope is None:
        return {}
    found = {"rope.freq_base": rope.theta, "rope.dimension_count": rotated}
    sliding = next((layer.attention.rope for layer in decoder.layers if layer.attention.window), None)
    if sliding:
        found["rope.freq_base_swa"] = sliding.theta
    if rope.original_max_positions:
        found["rope.scaling.original_context_length"] = rope.original_max_positions
    return found | _scaling(config, rope)


def _rope(decoder: DecoderConfig) -> tuple[Rope | None, int]:
    """Return the rotary positions of layers without a window, or of others, and how many dimensions are rotated."""
    found = [layer.attention for layer in decoder.layers if layer.attention.rope]
    of = min(found, key=lambda each: each.window is not None, default=decoder.attention)
    return of.rope, of.rotated


def _settings(config: Config) -> Config:
    """Return the rotary settings of layers without a window."""
    scaling, rope = (config.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    nested = rope.get(FULL)
    return {**nested, **scaling} if nested is not None else scaling or rope


def _scaling(config: Config, rope: Rope) -> Entries:
    """Return the entries for the scaling of rotary positions; the rest of it is in tensors."""
    settings = _settings(config)
    if rope.long_factors:
        return {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": rope.scale}
    match _stated_kind(config):
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": float(settings["factor"])}
        case "yarn":
            return _yarn(config, rope)
    return {} if rope.scale == 1 else {"rope.scaling.attn_factor": rope.scale}


def _stated_kind(config: Config) -> str | None:
    """Return the kind of scaling if entries describe all of it: linear, or YaRN with whole pairs as its bounds."""
    settings = _settings(config)
    kind = settings.get("rope_type") or settings.get("type")
    beside = config.get("rope_parameters") or {}
    is_truncated = False not in (settings.get("truncate"), beside.get("truncate"))
    is_stated = settings.get("factor") is not None and _original(config) is not None and is_truncated
    return kind if kind == "linear" or (kind == "yarn" and is_stated) else None


def _original(config: Config) -> int | None:
    """Return the context length before scaling. An entry outside the settings goes first, unless layers differ."""
    stated: int | None = _settings(config).get(_ORIGINAL)
    is_nested = FULL in (config.get("rope_parameters") or {})
    return stated if is_nested else config.get(_ORIGINAL) or stated


def _yarn(config: Config, rope: Rope) -> Entries:
    """Return the entries of YaRN. Its factor of cosines and sines has two entries, of which one is needed."""
    settings = _settings(config)
    factor = float(settings["factor"])
    found = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": _original(config),
    }
    for key in ("beta_fast", "beta_slow"):
        if settings.get(key):
            found[f"rope.scaling.yarn_{key}"] = float(settings[key])
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if math.isclose(rope.scale, usual):
        return found
    if rope.scale >= usual or settings.get("attention_factor") not in (None, 1):
        return {**found, "rope.scaling.yarn_attn_factor": rope.scale}
    return {**found, "rope.scaling.yarn_log_multiplier": (usual / rope.scale - 1) / (usual - 1)}


def rope_tensors(config: Config, decoder: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the tensors of factors that some scalings of rotary positions have."""
    rope, _ = _rope(decoder)
    if rope is None or not rope.factors or not all(map(math.isfinite, rope.factors)):
        return {}
    if rope.long_factors:
        names = {"rope_factors_long.weight": rope.long_factors, "rope_factors_short.weight": rope.factors}
    else:
        names = {} if _stated_kind(config) else {"rope_freqs.weight": rope.factors}
    return {name: np.array(factors, np.float32) for name, factors in names.items()}
