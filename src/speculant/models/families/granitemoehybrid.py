"""Granite 4: Granite's multipliers; layers may have Mamba 2 in place of attention, and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import (
    FULL,
    LINEAR,
    MOST_EXPERTS,
    MOST_HEAD_DIM,
    POSITIVE,
    count,
    filled,
    flag,
    layers_of,
    number,
    read_attention,
    read_decoder,
    read_experts,
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
    Flattened,
    Layer,
    LogOfNegative,
    Mlp,
    Rows,
    Stacked,
    State,
    TensorMap,
    Unsqueezed,
    map_modules,
)
from speculant.models.families.granite import GGUF as GRANITE, read_scales
from speculant.models.gguf import BLOCK, GATE, PARTS, UP, Count, GgufFamily, HasTensor, Truth, of_experts, of_state
from speculant.models.sizes import EXPERT, LAYER, SHARED, STATE

_OLD_TYPES = {"mamba": LINEAR, "attention": FULL}  # names of layer types in the published files
_INFINITY = {"__float__": "Infinity"}  # in JSON that transformers writes
MAMBA = map_modules(LAYER, LAYER, {f"{STATE}{name}": f"mamba.{name}" for name in ("in_proj", "conv1d", "out_proj")})
VECTORS = ("A_log", "D", "dt_bias", "norm.weight")
GATE_AND_UP = map_modules(LAYER, BLOCK, {name: PARTS[name] for name in (GATE, UP)})  # which checkpoints fuse


def _gguf_tensors(decoder: DecoderConfig) -> TensorMap:
    """Return where GGUF files hold what other families lack."""
    of = decoder.state
    if of is None:
        return GATE_AND_UP
    own: dict[str, Expression] = {
        "A_log": LogOfNegative(Flattened(f"{BLOCK}ssm_a", 1)),
        "D": Flattened(f"{BLOCK}ssm_d", 1),
        "dt_bias": f"{BLOCK}ssm_dt.bias",
        "norm.weight": Flattened(f"{BLOCK}ssm_norm.weight", of.size // of.key_heads),
    }
    modules: dict[str, Expression] = {"in_proj": "ssm_in", "conv1d": Unsqueezed("ssm_conv1d"), "out_proj": "ssm_out"}
    mapped = map_modules(LAYER + STATE, BLOCK, modules).names
    return TensorMap((*GATE_AND_UP.names, *mapped, *((f"{LAYER}{STATE}{name}", made) for name, made in own.items())))


DENSE = replace(GRANITE, tensors=GATE_AND_UP)
GGUF = GgufFamily("granitehybrid", paired=True, keyless=LINEAR, tensors=_gguf_tensors, stateless=DENSE, config={
    **GRANITE.config,
    "shared_intermediate_size": Count(
        "expert_shared_feed_forward_length", "feed_forward_length", of_experts("shared.size")
    ),
    "num_local_experts": Count("expert_count", 0, least=0),
    "num_experts_per_tok": Count("expert_used_count", 0, least=0),
    "rotates": Truth("rope.scaling.finetuned", True, lambda decoder: decoder.attention.rope is not None),
    "position_embedding_type": lambda config: "rope" if config["rotates"] else None,
    "mamba_d_conv": Count("ssm.conv_kernel", of=of_state("conv")),
    "mamba_d_state": Count("ssm.state_size", of=of_state("key_dim")),
    "mamba_n_groups": Count("ssm.group_count", of=of_state("key_heads")),
    "mamba_n_heads": Count("ssm.time_step_rank", of=of_state("heads")),
    "mamba_inner_size": Count("ssm.inner_size", of=of_state("size")),
    "mamba_d_head": lambda config: config["mamba_inner_size"] // config["mamba_n_heads"],
    "mamba_expand": lambda config: config["mamba_inner_size"] // config["hidden_size"],
    "mamba_conv_bias": HasTensor("ssm_conv1d.bias", yes=True, no=False),
}, neutral={"expert_weights_norm": (True,)})  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Granite 4 config.json."""
    bias, norm, scales = flag(hf, "attention_bias"), read_norm(hf), read_scales(hf)
    rotates = hf.get("position_embedding_type") == "rope"
    rope = read_rope(hf, count(hf, "max_position_embeddings")) if rotates else None
    attention = read_attention(hf, rope=rope, bias=bias, output_bias=bias, scale=scales["attention_multiplier"])
    mlp = _read_block(filled(hf, shared_intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2))
    kinds = read_layer_types({**hf, "layer_types": _types(hf)}, lambda _: False, LINEAR)
    made = {FULL: Layer(attention, mlp, norm, norm, residual_scale=scales["residual_multiplier"])}
    if LINEAR in kinds:
        _check_silu(mlp.activation)
        made[LINEAR] = replace(made[FULL], attention=None, state=read_mamba(hf))
    return read_decoder(
        hf, layers_of(kinds, made.__getitem__), _tensors(mlp), norm,
        embedding={"scale": scales["embedding_multiplier"]}, head={"scale": 1 / scales["logits_scaling"]},
    )  # fmt: skip


def _read_block(hf: Mapping[str, Any]) -> Mlp | Experts:
    """Read the block that all tokens use, and experts if there are any."""
    shared = read_mlp(hf, size="shared_intermediate_size")
    has_experts = count(hf, "num_local_experts", most=MOST_EXPERTS, least=0)
    return read_experts({**hf, "num_experts": None}, shared=shared) if has_experts else shared


def _check_silu(activation: str) -> None:
    """Raise ModelError for another activation: that of feed-forward blocks is that of convolutions, too."""
    if activation != "silu":
        raise ModelError(
            f"config.json asks for hidden_act={activation} in layers with a state; only silu is implemented",
            "use a checkpoint of one of the published models.",
        )


def read_mamba(hf: Mapping[str, Any]) -> State:
    """Read the sizes of Mamba 2."""
    heads, groups = count(hf, "mamba_n_heads", 128), count(hf, "mamba_n_groups", 1)
    size = count(hf, "hidden_size") * count(hf, "mamba_expand", 2)
    state = count(hf, "mamba_d_state", 256, MOST_HEAD_DIM)
    given = None if hf.get("mamba_d_head") == "auto" else hf.get("mamba_d_head")
    head_dim = count({"mamba_d_head": given}, "mamba_d_head", max(1, size // heads), MOST_HEAD_DIM)
    if heads * head_dim != size:
        raise ModelError(
            f"config.json has {heads} heads of {head_dim} in states of {size} numbers",
            "check mamba_n_heads, mamba_d_head, mamba_expand and hidden_size in config.json.",
        )
    return State(
        size + 2 * groups * state, count(hf, "mamba_d_conv", 4, MOST_HEAD_DIM), heads, groups, state, head_dim,
        read_norm(hf), flag(hf, "mamba_proj_bias"), flag(hf, "mamba_conv_bias", True), _steps(hf),
    )  # fmt: skip


def _steps(hf: Mapping[str, Any]) -> tuple[float, float]:
    """Read the limits of time steps."""
    key, given = "time_step_limit", hf.get("time_step_limit") or (0.0, math.inf)
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ModelError(f"config.json has {key} = {show(given)}, not two numbers", "correct config.json.")
    least, most = (math.inf if each == _INFINITY else each for each in given)
    least = number({key: least}, key, None, 0, POSITIVE[1])
    return least, number({key: most}, key, None, max(least, POSITIVE[0]), math.inf)


def _types(hf: Mapping[str, Any]) -> Any:
    """Return the layer types by their names here."""
    given = hf.get("layer_types")
    return [_OLD_TYPES.get(str(kind), kind) for kind in given] if isinstance(given, list) else given


def _tensors(mlp: Mlp | Experts) -> TensorMap:
    """Return the names in the files."""
    vectors = ((f"{LAYER}{STATE}{name}", f"{LAYER}mamba.{name}") for name in VECTORS)
    if isinstance(mlp, Mlp):
        return TensorMap((*MAMBA.names, *vectors, *map_modules(LAYER, LAYER, _block("mlp.", mlp.size)).names))
    assert mlp.shared
    experts = {
        f"{LAYER}{EXPERT}{{}}.{name}.weight": made
        for name, made in _halves(Stacked(f"{LAYER}block_sparse_moe.input_linear.weight", mlp.count), mlp.size).items()
    } | {f"{LAYER}{EXPERT}{{}}.down_proj.weight": Stacked(f"{LAYER}block_sparse_moe.output_linear.weight", mlp.count)}
    router = {"mlp.router": "block_sparse_moe.router.layer"}
    named = map_modules(LAYER, LAYER, {**router, **_block(SHARED, mlp.shared.size)}).names
    return TensorMap((*MAMBA.names, *vectors, *named, *experts.items()))


def _block(own: str, size: int) -> dict[str, Expression]:
    """Return where files have the block that all tokens use."""
    named: dict[str, Expression] = {"down_proj": "shared_mlp.output_linear"}
    return {own + name: made for name, made in (named | _halves("shared_mlp.input_linear", size)).items()}


def _halves(both: Expression, size: int) -> dict[str, Expression]:
    """Return gate and up, which are one matrix in files."""
    return {"gate_proj": Rows(both, 0, size, 2 * size), "up_proj": Rows(both, size, size, 2 * size)}
