"""SmolLM3: Llama's arithmetic; every fourth layer has no rotary positions, and may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    SLIDING,
    count,
    count_layers,
    filled,
    flag,
    is_whole,
    layers_of,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    show,
    window,
)
from speculant.models.description import DecoderConfig, Layer
from speculant.models.gguf import GgufFamily

GGUF = GgufFamily("smollm3", paired=True)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a SmolLM3 config.json."""
    hf = {"sliding_window": None, "num_key_value_heads": 4, **filled(hf, tie_word_embeddings=True)}
    bias, norm, mlp = flag(hf, "attention_bias"), read_norm(hf), read_mlp(hf, bias=flag(hf, "mlp_bias"))
    rotated, size = _rotated(hf), window(hf) if flag(hf, "use_sliding_window") else None
    kinds = read_layer_types(hf, lambda index: size is None or rotated[index])
    rope = read_rope(hf, count(hf, "max_position_embeddings"), theta=2e6)

    def layer(kind: tuple[bool, bool]) -> Layer:
        attention = read_attention(
            hf, rope=rope if kind[0] else None, window=size if kind[1] else None, bias=bias, output_bias=bias
        )
        return Layer(attention, mlp, norm, norm)

    return read_decoder(hf, layers_of(list(zip(rotated, [kind == SLIDING for kind in kinds], strict=True)), layer))


def _rotated(hf: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    layers, given = count_layers(hf), hf.get("no_rope_layers")
    if given is None:
        every = count(hf, "no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(given, list) or len(given) != layers or any(not is_whole(each) or each > 1 for each in given):
        raise ModelError(
            f"config.json has no_rope_layers = {show(given)}, not 0 or 1 for each of {layers} layers",
            "correct config.json.",
        )
    return [each == 1 for each in given]
