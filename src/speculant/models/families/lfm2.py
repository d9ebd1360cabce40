"""LFM2: most layers have a short convolution in place of attention (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speculant.models.config import (
    FULL,
    MOST_HEAD_DIM,
    POSITIVE,
    count,
    count_layers,
    filled,
    flag,
    layers_of,
    number,
    read_attention,
    read_decoder,
    read_layer_types,
    read_norm,
    whole_numbers,
)
from speculant.models.description import DecoderConfig, Experts, Layer, Mlp, State, TensorMap, Unsqueezed, map_modules
from speculant.models.gguf import BLOCK, Count, GgufFamily, of_state
from speculant.models.sizes import BEFORE_ATTENTION, BEFORE_MLP, LAYER, SELF, STATE

CONV = "conv"
GGUF_TENSORS = map_modules(LAYER, BLOCK, {
    f"{STATE}in_proj": "shortconv.in_proj", f"{STATE}conv1d": Unsqueezed("shortconv.conv"),
    f"{STATE}out_proj": "shortconv.out_proj",
}, {"model.norm": "token_embd_norm"})  # fmt: skip
GGUF = GgufFamily("lfm2", norm_eps="norm_eps", keyless=CONV, tensors=GGUF_TENSORS, config={
    "conv_L_cache": Count("shortconv.l_cache", of=of_state("conv")),
    "block_auto_adjust_ff_dim": lambda _: False,
})  # fmt: skip
TENSORS = map_modules(LAYER, LAYER, {
    f"{STATE}in_proj": "conv.in_proj", f"{STATE}conv1d": "conv.conv", f"{STATE}out_proj": "conv.out_proj",
    f"{SELF}q_norm": f"{SELF}q_layernorm", f"{SELF}k_norm": f"{SELF}k_layernorm", f"{SELF}o_proj": f"{SELF}out_proj",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    BEFORE_ATTENTION: "operator_norm", BEFORE_MLP: "ffn_norm",
}, {"model.norm": "model.embedding_norm"})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an LFM2 config.json."""
    tied = hf.get("tie_embedding") if hf.get("tie_word_embeddings") is None else hf.get("tie_word_embeddings")
    return read_convolutions(filled(hf, tie_word_embeddings=tied), [Mlp(_inner_size(hf))] * count_layers(hf))


def read_convolutions(
    hf: Mapping[str, Any], blocks: Sequence[Mlp | Experts], tensors: TensorMap = TENSORS
) -> DecoderConfig:
    """Read a model with these feed-forward blocks, one for each layer."""
    hf = filled(hf, tie_word_embeddings=True, rope_theta=1e6)
    norm = read_norm(hf, "norm_eps", 1e-5)
    attention = read_attention(hf, qk_norm=norm)
    conv, bias = count(hf, "conv_L_cache", 3, MOST_HEAD_DIM), flag(hf, "conv_bias")
    state, full = State(count(hf, "hidden_size"), conv, bias=bias, conv_bias=bias), whole_numbers(hf, "full_attn_idxs")
    kinds = read_layer_types(hf, lambda index: index in full or hf.get("full_attn_idxs") is None, CONV)

    def make(of: tuple[str, Mlp | Experts]) -> Layer:
        kind, mlp = of
        return Layer(attention if kind == FULL else None, mlp, norm, norm, state=None if kind == FULL else state)

    return read_decoder(hf, layers_of(list(zip(kinds, blocks, strict=True)), make), tensors, norm)


def _inner_size(hf: Mapping[str, Any]) -> int:
    """Return the width of the feed-forward block, which may be stated before two adjustments."""
    size = count(hf, "intermediate_size" if hf.get("block_ff_dim") is None else "block_ff_dim", 12288)
    if not flag(hf, "block_auto_adjust_ff_dim", True):
        return size
    size = int(number(hf, "block_ffn_dim_multiplier", 1.0, *POSITIVE) * int(2 * size / 3))
    multiple = count(hf, "block_multiple_of", 256)
    return -(-size // multiple) * multiple
