"""BART: an encoder and a decoder with learned positions, whose norms follow the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.models.config import MOST, MOST_LAYERS, count, filled, flag, read_attention, read_decoder, read_mlp
from speculant.models.description import (
    DecoderConfig,
    Encoder,
    Expression,
    Layer,
    Norm,
    Rows,
    Stacked,
    TensorMap,
    map_modules,
)
from speculant.models.sizes import ENCODER_LAYER, LAYER

PARTS = ("encoder", "decoder")
UNUSED_POSITIONS = 2  # rows of the stored tables before that of position 0
OTHER_NAMES = {
    "d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_attention_heads": "num_attention_heads",
}  # fmt: skip
DEFAULTS = {
    "vocab_size": 50_265, "d_model": 1024, "max_position_embeddings": 1024, "activation_function": "gelu",
    "tie_word_embeddings": True,
    **{f"{part}_{key}": value for part in PARTS for key, value in (
        ("layers", 12), ("attention_heads", 16), ("ffn_dim", 4096),
    )},
}  # fmt: skip
MOST_COMPUTED = 2**16  # the most positions with sinusoids, which no file holds; published models have up to 1024
NORM = Norm(1e-5, kind="layer", bias=True)


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a BART config.json."""
    return describe(hf, embedding={"norm": NORM})


def describe(
    hf: Mapping[str, Any], *, embedding: Mapping[str, Any], sinusoids: bool = False, norms_first: bool = False
) -> DecoderConfig:
    """Describe a model of BART's kind. norms_first: norms precede the blocks, and two more follow all layers.

    sinusoids: positions are not learned. embedding: the other fields of `Embedding`.
    """
    hf = filled(filled(hf, **{own: hf.get(shared) for own, shared in OTHER_NAMES.items()}), **DEFAULTS)
    width, most = count(hf, "d_model"), MOST_COMPUTED if sinusoids else MOST
    positions = count(hf, "max_position_embeddings", most=most)
    hf |= {"hidden_size": width, "num_key_value_heads": None, "head_dim": None}
    encoder, decoder = (_layers(hf, part, norms_first=norms_first) for part in PARTS)
    tensors = _tensors(len(encoder), len(decoder), 0 if sinusoids else positions, norms_first=norms_first)
    scale = width**0.5 if flag(hf, "scale_embedding") else 1.0
    own = {"scale": scale, "positions": positions, "sinusoids": sinusoids, **embedding}
    parts = Encoder(encoder, NORM)
    return read_decoder(hf, decoder, tensors, NORM, embedding=own, head={"bias": True}, encoder=parts)


def _layers(hf: Mapping[str, Any], part: str, *, norms_first: bool) -> tuple[Layer, ...]:
    """Return the layers of the encoder or the decoder. If norms follow blocks, the last one is the part's own norm."""
    sizes = {**hf, "num_attention_heads": count(hf, f"{part}_attention_heads")}
    own = read_attention(sizes, rope=None, bias=True, output_bias=True, ahead=part == "encoder")
    cross = None if own.ahead else replace(own, source=True)
    inner = {"activation_function": hf["activation_function"], "intermediate_size": count(hf, f"{part}_ffn_dim")}
    mlp = read_mlp(inner, key="activation_function", bias=True, gated=False)
    layers = count(hf, f"{part}_layers", most=MOST_LAYERS)
    crossed = NORM if cross else None
    if norms_first:
        return (Layer(own, mlp, NORM, NORM, cross=cross, before_cross=crossed),) * layers
    each = Layer(own, mlp, None, None, cross=cross, end_attention=NORM, end_cross=crossed, end_mlp=NORM)
    return (*(each,) * (layers - 1), replace(each, end_mlp=None))


def _tensors(encoder: int, decoder: int, positions: int, *, norms_first: bool) -> TensorMap:
    """Return where files hold a model with these numbers of layers. positions: how many are learned; 0 = none."""
    norms = _NORMS_FIRST if norms_first else _NORMS_LAST
    names = list[tuple[str, Expression]]()
    for own, part, layers in ((ENCODER_LAYER, "encoder", encoder), (LAYER, "decoder", decoder)):
        prefix, stored = own.removesuffix("layers.{}."), f"model.{part}."
        last = "layer_norm" if norms_first else f"layers.{layers - 1}.final_layer_norm"
        outside: dict[str, Expression] = {
            f"{prefix}norm": stored + last,
            f"{prefix}embedding_norm": f"{stored}layernorm_embedding",
        }
        if positions:
            table = f"{stored}embed_positions"
            outside[f"{prefix}embed_positions"] = Rows(table, UNUSED_POSITIONS, positions, positions + UNUSED_POSITIONS)
        names += map_modules(own, f"{stored}layers.{{}}.", {**_BLOCKS, **norms}, outside).names
    names += [("model.embed_tokens.weight", "model.shared.weight"), ("lm_head.bias", Stacked("final_logits_bias", 1))]
    copies = tuple(("model.shared.weight", f"model.{part}.embed_tokens.weight") for part in PARTS)
    unused = {f"model.{part}.version" for part in PARTS}
    if not positions:
        unused |= {f"model.{part}.embed_positions.weight" for part in PARTS}
    return TensorMap(tuple(names), frozenset(unused), copies)


_BLOCKS: Mapping[str, Expression] = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
    "self_attn.o_proj": "self_attn.out_proj",
    **{f"cross_attn.{name}_proj": f"encoder_attn.{name}_proj" for name in "qkv"},
    "cross_attn.o_proj": "encoder_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_NORMS_FIRST: Mapping[str, Expression] = {
    "input_layernorm": "self_attn_layer_norm",
    "cross_attention_layernorm": "encoder_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
}
_NORMS_LAST: Mapping[str, Expression] = {
    "attention_end_norm": "self_attn_layer_norm",
    "cross_attention_end_norm": "encoder_attn_layer_norm",
    "mlp_end_norm": "final_layer_norm",
}
