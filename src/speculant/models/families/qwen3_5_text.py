"""Qwen3.5: three of four layers have a gated delta rule in place of attention, whose result is gated too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    FULL,
    LINEAR,
    MOST_HEAD_DIM,
    count,
    count_layers,
    filled,
    flag,
    layers_of,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_norm,
    read_rope,
    show,
)
from speculant.models.description import (
    DecoderConfig,
    Experts,
    Expression,
    Layer,
    LogOfNegative,
    Mlp,
    Rows,
    State,
    TensorMap,
    Unsqueezed,
    Untiled,
    UntiledColumns,
    map_modules,
)
from speculant.models.gguf import BLOCK, Count, GgufFamily, LayerFlags, of_state
from speculant.models.sizes import BEFORE_MLP, LAYER, SELF, STATE

_CONV, _INTERVAL = 4, 4
GGUF_NORMS = map_modules(LAYER, BLOCK, {BEFORE_MLP: "post_attention_norm"}).names


def _gguf_tensors(decoder: DecoderConfig) -> TensorMap:
    """Return where GGUF files hold what other families lack. In them, the heads of values are tiled."""
    of = decoder.state
    if of is None:
        return TensorMap(GGUF_NORMS)
    groups = of.heads, of.key_heads
    own: dict[str, Expression] = {
        "in_proj_qkv.weight": Untiled(f"{BLOCK}attn_qkv.weight", *groups, first=2 * of.key_size),
        "in_proj_z.weight": Untiled(f"{BLOCK}attn_gate.weight", *groups),
        "in_proj_b.weight": Untiled(f"{BLOCK}ssm_beta.weight", *groups),
        "in_proj_a.weight": Untiled(f"{BLOCK}ssm_alpha.weight", *groups),
        "conv1d.weight": Unsqueezed(Untiled(f"{BLOCK}ssm_conv1d.weight", *groups, first=2 * of.key_size)),
        "A_log": LogOfNegative(Untiled(f"{BLOCK}ssm_a", *groups)),
        "dt_bias": Untiled(f"{BLOCK}ssm_dt.bias", *groups),
        "norm.weight": f"{BLOCK}ssm_norm.weight",
        "out_proj.weight": UntiledColumns(f"{BLOCK}ssm_out.weight", *groups),
    }
    return TensorMap((*GGUF_NORMS, *((f"{LAYER}{STATE}{name}", made) for name, made in own.items())))


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    interval = count(hf, "full_attention_interval", _INTERVAL)
    return read_layer_types(hf, lambda index: (index + 1) % interval == 0, LINEAR)


_HEAD = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}  # fmt: skip
GGUF = GgufFamily("qwen35", behind="nextn_predict_layers", head=_HEAD, tensors=_gguf_tensors, config={
    "full_attention_interval": Count("full_attention_interval", _INTERVAL, lambda decoder: 1 + next(
        index for index, layer in enumerate(decoder.layers) if layer.attention
    )),
    "layer_types": LayerFlags(
        "attention.recurrent_layers", LINEAR, FULL, lambda config: _layer_types({**config, "layer_types": None}),
        lambda decoder: [layer.state is not None for layer in decoder.layers],
    ),
    "linear_conv_kernel_dim": Count("ssm.conv_kernel", of=of_state("conv")),
    "linear_num_key_heads": Count("ssm.group_count", of=of_state("key_heads")),
    "linear_num_value_heads": Count("ssm.time_step_rank", of=of_state("heads")),
    "linear_key_head_dim": Count("ssm.state_size", of=of_state("key_dim")),
    "linear_inner_size": Count("ssm.inner_size", of=of_state("size")),
    "linear_value_head_dim": lambda config: config["linear_inner_size"] // config["linear_num_value_heads"],
})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a Qwen3.5 text model."""
    return read_hybrid(hf, [read_mlp(hf)] * count_layers(hf))


def read_hybrid(
    hf: Mapping[str, Any],
    blocks: Sequence[Mlp | Experts],
    tensors: Mapping[str, Expression] = MappingProxyType({}),
) -> DecoderConfig:
    """Read a model with these feed-forward blocks, one for each layer. tensors: where files have further ones."""
    hf = filled(hf, head_dim=256)
    norm, head_dim = read_norm(hf, offset=1.0), count(hf, "head_dim", most=MOST_HEAD_DIM)
    bias, rope = flag(hf, "attention_bias"), read_rope(hf, count(hf, "max_position_embeddings"), share=0.25)
    attention = read_attention(hf, rope=rope, qk_norm=norm, bias=bias, output_bias=bias, gated=True)
    state = read_delta_rule(hf)
    if any(mlp.activation != "silu" for mlp in blocks):
        raise ModelError(
            f"config.json asks for hidden_act={show(hf['hidden_act'])}, and the convolutions are implemented for silu",
            "use a checkpoint of this family with silu.",
        )

    def make(of: tuple[str, Mlp | Experts]) -> Layer:
        kind, mlp = of
        return Layer(attention if kind == FULL else None, mlp, norm, norm, state=None if kind == FULL else state)

    layers = layers_of(list(zip(_layer_types(hf), blocks, strict=True)), make)
    return read_decoder(hf, layers, TensorMap((*_gates(head_dim).items(), *tensors.items())), norm)


def read_delta_rule(hf: Mapping[str, Any]) -> State:
    """Read the sizes of the gated delta rule."""
    key_heads, heads = count(hf, "linear_num_key_heads", 16), count(hf, "linear_num_value_heads", 32)
    key_dim = count(hf, "linear_key_head_dim", 128, MOST_HEAD_DIM)
    head_dim = count(hf, "linear_value_head_dim", 128, MOST_HEAD_DIM)
    return State(
        2 * key_heads * key_dim + heads * head_dim, count(hf, "linear_conv_kernel_dim", _CONV, MOST_HEAD_DIM),
        heads, key_heads, key_dim, head_dim, read_norm(hf),
    )  # fmt: skip


def _gates(head_dim: int) -> dict[str, Expression]:
    """Return where queries and gates are: one after the other in each head of a tensor."""
    return {
        f"{LAYER}{SELF}{own}.{kind}": Rows(f"{LAYER}{SELF}q_proj.{kind}", first, head_dim, 2 * head_dim)
        for own, first in (("q_proj", 0), ("gate_proj", head_dim))
        for kind in ("weight", "bias")
    }
