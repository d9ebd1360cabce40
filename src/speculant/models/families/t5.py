"""T5, T5 1.1, Flan-T5 and MADLAD: an encoder and a decoder with learned numbers for distances instead of positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    MOST_LAYERS,
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
from speculant.models.description import (
    Attention,
    DecoderConfig,
    DistanceBias,
    Encoder,
    Expression,
    Layer,
    TensorMap,
    map_modules,
)
from speculant.models.gguf import GGUF_HEAD, GGUF_TABLE, Count, GgufFamily, HasTensor, Number, TokenId
from speculant.models.sizes import ENCODER_LAYER, LAYER

OTHER_NAMES = {
    "hidden_size": "d_model", "head_dim": "d_kv", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 32_128, "hidden_size": 512, "head_dim": 64, "d_ff": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "feed_forward_proj": "relu",
}  # fmt: skip
MOST_BUCKETS = 2**16
# Distances have no end, and transformers sets no limit. This one is as much as the default memory for keys and values:
# 8 texts of 4096. `n_positions`, often 512, is the length of training texts.
MOST_POSITIONS = 2**15


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a T5 config.json."""
    return describe(filled(hf, **renamed(hf, DEFAULTS)), scaled=scales(hf))


def renamed(hf: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries whose names are T5's own, under the names that families share, and defaults for others."""
    return {**defaults, **{key: count(hf, own) for key, own in OTHER_NAMES.items() if hf.get(own) is not None}}


def scales(hf: Mapping[str, Any]) -> bool:
    """Whether logits are scaled: unless the head was trained apart from the table, so that config.json unties it.

    transformers ties heads in each config.json that it writes, and keeps this fact in an entry of its own.
    """
    return flag(hf, "scale_decoder_outputs", flag(hf, "tie_word_embeddings", default=True))


def describe(hf: Mapping[str, Any], *, scaled: bool, own_distances: bool = False) -> DecoderConfig:
    """Describe a T5 with its sizes under the names that families share.

    scaled: logits are multiplied by hidden_size ** -0.5. own_distances: each layer has a table of distances; otherwise
    the first layers of the encoder and of the decoder have one for all.
    """
    hf = {**hf, "num_key_value_heads": None, "max_position_embeddings": MOST_POSITIONS, "tie_word_embeddings": True}
    norm, (activation, gated) = read_norm(hf, "layer_norm_epsilon"), _feed_forward(hf)
    mlp = read_mlp({"intermediate_size": count(hf, "d_ff"), "hidden_act": activation}, gated=gated)
    cross, encoder = _attention(hf, source=True), list[Layer]()
    decoder = list[Layer]()
    for index in range(count(hf, "num_decoder_layers", count_layers(hf), MOST_LAYERS)):
        own = _attention(hf, distances=_distances(hf, index, own=own_distances))
        decoder.append(Layer(own, mlp, norm, norm, cross=cross, before_cross=norm))
    for index in range(count_layers(hf)):
        distances = _distances(hf, index, own=own_distances, both_ways=True)
        encoder.append(Layer(_attention(hf, ahead=True, distances=distances), mlp, norm, norm))
    head = {"by_files": True, "scale": count(hf, "hidden_size") ** -0.5 if scaled else 1.0}
    return read_decoder(hf, decoder, _tensors(gated=gated), norm, head=head, encoder=Encoder(tuple(encoder), norm))


def _attention(hf: Mapping[str, Any], **own: Any) -> Attention:
    return read_attention(hf, rope=None, scale=1.0, **own)


def _distances(hf: Mapping[str, Any], index: int, *, own: bool, both_ways: bool = False) -> DistanceBias:
    return DistanceBias(
        count(hf, "relative_attention_num_buckets", 32, MOST_BUCKETS),
        count(hf, "relative_attention_max_distance", 128),
        both_ways,
        shares=None if own or index == 0 else 0,
    )


def _feed_forward(hf: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the name of the activation, and whether it is gated. Two entries override what `feed_forward_proj` says.

    "gated-gelu" is gelu_new.
    """
    given = hf["feed_forward_proj"]
    gate, _, name = given.rpartition("-") if isinstance(given, str) else ("?", "", "")
    if gate not in ("", "gated"):
        raise ModelError(
            f"config.json has feed_forward_proj = {show(given)}, not an activation or gated- and an activation",
            "correct config.json.",
        )
    usual = "gelu_new" if given == "gated-gelu" else name
    return hf.get("dense_act_fn") or usual, flag(hf, "is_gated_act", default=gate == "gated")


def _gguf_tensors() -> TensorMap:
    own: dict[str, Expression] = {
        "input_layernorm": "attn_norm",
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkvo"},
        "self_attn.distances": "attn_rel_b",
        "cross_attention_layernorm": "cross_attn_norm",
        **{f"cross_attn.{name}_proj": f"cross_attn_{name}" for name in "qkvo"},
        "post_attention_layernorm": "ffn_norm",
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    }
    decoder = map_modules(LAYER, "dec.blk.{}.", own, {
        "model.embed_tokens": GGUF_TABLE.removesuffix(".weight"),
        "lm_head": GGUF_HEAD.removesuffix(".weight"),
        "model.norm": "dec.output_norm",
        "encoder.norm": "enc.output_norm",
    })  # fmt: skip
    encoder = map_modules(ENCODER_LAYER, "enc.blk.{}.", own)
    return TensorMap((*decoder.names, *encoder.names), unused=frozenset({"dec.blk.0.cross_attn_rel_b.weight"}))


# Files say neither whether logits are scaled nor which activation there is. As in all published models, logits are
# scaled unless there is a head beside the table; gated blocks use gelu_new, and others ReLU.
GGUF = GgufFamily(
    "t5",
    blocks={"enc.blk": Count("block_count"), "dec.blk": Count("decoder_block_count", "block_count")},
    tensors=_gguf_tensors(),
    config={
        "num_decoder_layers": Count("decoder_block_count", "block_count"),
        "d_ff": Count("feed_forward_length"),
        "layer_norm_epsilon": Number("attention.layer_norm_rms_epsilon"),
        "relative_attention_num_buckets": Count("attention.relative_buckets_count"),
        "feed_forward_proj": HasTensor("dec.blk.0.ffn_gate.weight", "gated-gelu", "relu"),
        "decoder_start_token_id": TokenId("decoder_start_token_id"),
    },
)


def _tensors(*, gated: bool) -> TensorMap:
    up = {"mlp.gate_proj": "wi_0", "mlp.up_proj": "wi_1"} if gated else {"mlp.up_proj": "wi"}
    inner = {**up, "mlp.down_proj": "wo"}
    own: dict[str, Expression] = {
        "input_layernorm": "0.layer_norm",
        **{f"self_attn.{name}_proj": f"0.SelfAttention.{name}" for name in "qkvo"},
        "self_attn.distances": "0.SelfAttention.relative_attention_bias",
    }
    decoder = map_modules(LAYER, "decoder.block.{}.layer.", {
        **own,
        "cross_attention_layernorm": "1.layer_norm",
        **{f"cross_attn.{name}_proj": f"1.EncDecAttention.{name}" for name in "qkvo"},
        "post_attention_layernorm": "2.layer_norm",
        **{name: f"2.DenseReluDense.{stored}" for name, stored in inner.items()},
    }, {
        "model.embed_tokens": "shared",
        "model.norm": "decoder.final_layer_norm",
        "encoder.norm": "encoder.final_layer_norm",
    })  # fmt: skip
    encoder = map_modules(ENCODER_LAYER, "encoder.block.{}.layer.", {
        **own,
        "post_attention_layernorm": "1.layer_norm",
        **{name: f"1.DenseReluDense.{stored}" for name, stored in inner.items()},
    })  # fmt: skip
    copies = tuple(("shared.weight", f"{part}.embed_tokens.weight") for part in ("decoder", "encoder"))
    unused = frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"})
    return TensorMap((*decoder.names, *encoder.names), unused, copies)
