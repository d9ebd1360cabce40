"""GPT-2: learned positions, LayerNorm, transposed and fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import (
    check_unset,
    count,
    count_layers,
    filled,
    flag,
    read_attention,
    read_decoder,
    read_mlp,
    read_norm,
)
from speculant.models.description import Attention, DecoderConfig, Layer, Rows, TensorMap, Transposed, map_modules
from speculant.models.gguf import Count, GgufFamily
from speculant.models.sizes import LAYER

OTHER_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip

GGUF = GgufFamily("gpt2", norm_eps="layer_norm_epsilon", config={"n_inner": Count("feed_forward_length")})


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a GPT-2 config.json."""
    hf = filled(hf, tie_word_embeddings=True, activation_function="gelu_new")
    hf |= {key: hf[other] for key, other in OTHER_NAMES.items() if hf.get(other) is not None}
    hf |= {"num_key_value_heads": None, "intermediate_size": hf.get("n_inner") or 4 * count(hf, "hidden_size")}
    check_unset(hf, "scale_attn_by_inverse_layer_idx")
    scale = None if flag(hf, "scale_attn_weights", True) else 1.0
    positions = count(hf, "max_position_embeddings")
    norm = read_norm(hf, "layer_norm_epsilon", 1e-5, kind="layer", bias=True)
    mlp = read_mlp(hf, key="activation_function", bias=True, gated=False)
    attention = read_attention(hf, rope=None, bias=True, output_bias=True, scale=scale)
    layer = Layer(attention, mlp, norm, norm)
    return read_decoder(hf, [layer] * count_layers(hf), _tensors(attention), norm, embedding={"positions": positions})


def _tensors(of: Attention) -> TensorMap:
    size, qkv = of.query_size, Transposed("attn.c_attn")
    return map_modules(LAYER, "transformer.h.{}.", {
        "input_layernorm": "ln_1",
        **{f"self_attn.{name}_proj": Rows(qkv, i * size, size, 3 * size) for i, name in enumerate("qkv")},
        "self_attn.o_proj": Transposed("attn.c_proj"),
        "post_attention_layernorm": "ln_2",
        "mlp.up_proj": Transposed("mlp.c_fc"),
        "mlp.down_proj": Transposed("mlp.c_proj"),
    }, {
        "model.embed_tokens": "transformer.wte",
        "model.embed_positions": "transformer.wpe",
        "model.norm": "transformer.ln_f",
    })  # fmt: skip
