"""StarCoder 2: LayerNorm, biases, and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    count_layers,
    filled,
    flag,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    window,
)
from speculant.models.description import DecoderConfig, Layer, map_modules
from speculant.models.gguf import GgufFamily
from speculant.models.sizes import LAYER

TENSORS = map_modules(LAYER, LAYER, {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})

GGUF = GgufFamily("starcoder2", norm_eps="norm_epsilon", config={"use_bias": lambda config: config["attention_bias"]})


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a StarCoder 2 config.json."""
    hf = {"sliding_window": None, **filled(hf, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh")}
    bias, norm = flag(hf, "use_bias", True), read_norm(hf, "norm_epsilon", 1e-5, kind="layer", bias=True)
    attention = read_attention(hf, window=window(hf), bias=bias, output_bias=bias)
    layer = Layer(attention, read_mlp(hf, bias=bias, gated=False), norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), TENSORS, norm)
