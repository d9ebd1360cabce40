"""OPT: learned positions, LayerNorm, ReLU, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    count,
    count_layers,
    filled,
    flag,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    show,
)
from speculant.models.description import DecoderConfig, Layer, Rows, TensorMap, map_modules
from speculant.models.sizes import LAYER

UNUSED_POSITIONS = 2  # rows of the stored table before that of position 0


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an OPT config.json."""
    hf = filled(hf, tie_word_embeddings=True, activation_function="relu")
    hf |= {"num_key_value_heads": None, "intermediate_size": hf.get("ffn_dim", 3072)}
    width, positions = count(hf, "hidden_size"), count(hf, "max_position_embeddings")
    unusual = {"word_embed_proj_dim": width, "do_layer_norm_before": True, "layer_norm_elementwise_affine": True}
    for key, value in unusual.items():
        if hf.get(key) not in (None, value):
            raise ModelError(
                f"config.json has {key} = {show(hf[key])}, which is not implemented",
                f"use a checkpoint of this family with {key} = {value}.",
            )
    bias, norm = flag(hf, "enable_bias", True), read_norm(hf, "layer_norm_eps", 1e-5, kind="layer", bias=True)
    mlp = read_mlp(hf, key="activation_function", bias=bias, gated=False)
    layer = Layer(read_attention(hf, rope=None, bias=bias, output_bias=bias), mlp, norm, norm)
    tensors = _tensors(positions)
    return read_decoder(hf, [layer] * count_layers(hf), tensors, norm, embedding={"positions": positions})


def _tensors(positions: int) -> TensorMap:
    before, table = "model.decoder.", "model.decoder.embed_positions"
    return map_modules(LAYER, before + "layers.{}.", {
        "input_layernorm": "self_attn_layer_norm",
        **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
        "self_attn.o_proj": "self_attn.out_proj",
        "post_attention_layernorm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }, {
        "model.embed_tokens": before + "embed_tokens",
        "model.embed_positions": Rows(table, UNUSED_POSITIONS, positions, positions + UNUSED_POSITIONS),
        "model.norm": before + "final_layer_norm",
    })  # fmt: skip
