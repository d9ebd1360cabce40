"""Qwen3.5 and 3.6 with experts, one of which all tokens use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.models.config import count, count_layers, filled, read_experts, read_mlp
from speculant.models.description import DecoderConfig, Experts, Expression, Rows, Stacked
from speculant.models.families.qwen3_5_text import GGUF as DENSE, read_hybrid
from speculant.models.families.qwen3_moe import GGUF as EXPERTS
from speculant.models.gguf import Count, of_experts
from speculant.models.sizes import EXPERT, LAYER

_SHARED = Count("expert_shared_feed_forward_length", of=of_experts("shared.size"))
GGUF = replace(
    DENSE, architecture="qwen35moe", config={
        **DENSE.config,
        **{key: value for key, value in EXPERTS.config.items() if key != "norm_topk_prob"},
        "shared_expert_intermediate_size": _SHARED,
    }, neutral={"expert_weights_norm": (True,)},
)  # fmt: skip
DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
ROUTER = {f"{LAYER}mlp.router.weight": f"{LAYER}mlp.gate.weight"}


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read the config.json of a Qwen3.5 text model with experts."""
    experts = read_shared_experts(filled(hf, **DEFAULTS))
    return read_hybrid(hf, [experts] * count_layers(hf), {**ROUTER, **_stacked(experts)})


def read_shared_experts(hf: Mapping[str, Any], **own: Any) -> Experts:
    """Read a layer's experts, with one that all tokens use; `own` has other fields."""
    size = count(hf, "shared_expert_intermediate_size", 512)
    shared = read_mlp({**hf, "intermediate_size": size})
    return read_experts(hf, "moe_intermediate_size", shared=shared, shared_gate=True, **own)


def _stacked(of: Experts) -> dict[str, Expression]:
    """Return where files have the experts' matrices: stacked, with gate and up in one. Some files have them apart."""
    both = f"{LAYER}{EXPERT}gate_up_proj"
    made: dict[str, Expression] = {
        "gate_proj": Rows(Stacked(both, of.count), 0, of.size, 2 * of.size),
        "up_proj": Rows(Stacked(both, of.count), of.size, of.size, 2 * of.size),
        "down_proj": Stacked(f"{LAYER}{EXPERT}down_proj", of.count),
    }
    return {f"{LAYER}{EXPERT}{{}}.{name}.weight": each for name, each in made.items()}
