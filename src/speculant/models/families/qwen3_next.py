"""Qwen3-Next: Qwen3.5's layers with experts, whose states read projections that are interleaved by key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from speculant.models.config import filled, flag
from speculant.models.description import (
    DecoderConfig,
    Expression,
    LogOfNegative,
    Picked,
    Rows,
    State,
    TensorMap,
    Unsqueezed,
)
from speculant.models.families.qwen3_5_moe_text import GGUF as HYBRID, ROUTER, read_shared_experts
from speculant.models.families.qwen3_5_text import GGUF_NORMS, read_delta_rule, read_hybrid
from speculant.models.families.qwen3_moe import GGUF as EXPERTS, read_blocks
from speculant.models.gguf import BLOCK
from speculant.models.sizes import LAYER, STATE


def _gguf_tensors(decoder: DecoderConfig) -> TensorMap:
    """Return where GGUF files hold what other families lack. The heads of values have the model's order."""
    of = decoder.state
    own: dict[str, Expression] = {
        "in_proj_qkv.weight": f"{BLOCK}attn_qkv.weight",
        "in_proj_z.weight": f"{BLOCK}attn_gate.weight",
        "conv1d.weight": Unsqueezed(f"{BLOCK}ssm_conv1d.weight"),
        "A_log": LogOfNegative(f"{BLOCK}ssm_a"),
        "dt_bias": f"{BLOCK}ssm_dt.bias",
        "norm.weight": f"{BLOCK}ssm_norm.weight",
        "out_proj.weight": f"{BLOCK}ssm_out.weight",
        **(rates_of(f"{BLOCK}ssm_ba.weight", of.heads // of.key_heads) if of else {}),
    }
    return TensorMap((*GGUF_NORMS, *((f"{LAYER}{STATE}{name}", made) for name, made in own.items())))


GGUF = replace(
    HYBRID, architecture="qwen3next", tensors=_gguf_tensors, config={**HYBRID.config, **EXPERTS.config}, neutral={}
)
DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
_BOTH, _RATES = f"{LAYER}{STATE}in_proj_qkvz.weight", f"{LAYER}{STATE}in_proj_ba.weight"


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Qwen3-Next config.json."""
    hf = filled(hf, **DEFAULTS)
    experts = read_shared_experts(hf, renormalise=flag(hf, "norm_topk_prob", True))
    return read_hybrid(hf, read_blocks(hf, experts), {**ROUTER, **_projections(read_delta_rule(hf))})


def _projections(of: State) -> dict[str, Expression]:
    """Return where files have the projections: a key's own query, key, values and gates are neighbours."""
    served = of.heads // of.key_heads
    values = served * of.head_dim
    period = 2 * (of.key_dim + values)
    parts = [range(of.key_dim), range(of.key_dim, 2 * of.key_dim), range(2 * of.key_dim, 2 * of.key_dim + values)]
    columns = [[key * period + row for key in range(of.key_heads) for row in part] for part in parts]
    made: dict[str, Expression] = {
        "in_proj_qkv.weight": Picked(_BOTH, tuple(chain(*columns)), of.key_heads * period),
        "in_proj_z.weight": Rows(_BOTH, 2 * of.key_dim + values, values, period),
        **rates_of(_RATES, served),
    }
    return {f"{LAYER}{STATE}{name}": each for name, each in made.items()}


def rates_of(stored: str, served: int) -> dict[str, Expression]:
    """Return where a tensor has the projections of b and a: those of the heads that a key serves are neighbours."""
    return {
        "in_proj_b.weight": Rows(stored, 0, served, 2 * served),
        "in_proj_a.weight": Rows(stored, served, served, 2 * served),
    }
