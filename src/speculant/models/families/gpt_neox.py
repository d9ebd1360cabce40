"""GPT-NeoX and Pythia: both blocks read the same residual stream; part of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    count,
    count_layers,
    filled,
    flag,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
    read_rope,
)
from speculant.models.description import Attention, DecoderConfig, Layer, Rows, TensorMap, map_modules
from speculant.models.gguf import GgufFamily, Truth
from speculant.models.sizes import LAYER

GGUF = GgufFamily("gptneox", norm_eps="layer_norm_eps", config={
    "use_parallel_residual": Truth("use_parallel_residual", True, lambda decoder: decoder.layers[0].parallel),
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a GPT-NeoX config.json."""
    hf = {**filled(hf, hidden_act="gelu"), "num_key_value_heads": None}
    rope = read_rope(hf, count(hf, "max_position_embeddings"), share=0.25)
    bias, norm = flag(hf, "attention_bias", True), read_norm(hf, "layer_norm_eps", 1e-5, kind="layer", bias=True)
    attention = read_attention(hf, rope=rope, bias=bias, output_bias=bias)
    mlp = read_mlp(hf, bias=True, gated=False)
    layer = Layer(attention, mlp, norm, norm, parallel=flag(hf, "use_parallel_residual", True))
    return read_decoder(hf, [layer] * count_layers(hf), _tensors(attention), norm)


def _tensors(of: Attention) -> TensorMap:
    """The rows of a head's query, key and value follow one another."""
    size, qkv = of.head_dim, "attention.query_key_value"
    return map_modules(LAYER, "gpt_neox.layers.{}.", {
        "input_layernorm": "input_layernorm",
        **{f"self_attn.{name}_proj": Rows(qkv, i * size, size, 3 * size) for i, name in enumerate("qkv")},
        "self_attn.o_proj": "attention.dense",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }, {
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    })  # fmt: skip
