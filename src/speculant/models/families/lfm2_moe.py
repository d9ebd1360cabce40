"""LFM2 with experts, which a sigmoid of scores weights; the first layers have the block of a dense model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.models.config import POSITIVE, count, count_layers, filled, flag, number, read_experts
from speculant.models.description import DecoderConfig, Mlp, TensorMap, map_modules
from speculant.models.families.lfm2 import GGUF as DENSE, GGUF_TENSORS, TENSORS as OF_DENSE, read_convolutions
from speculant.models.families.qwen3_moe import GGUF as EXPERTS
from speculant.models.gguf import BLOCK, Count, Number, of_experts
from speculant.models.sizes import LAYER


def _dense_layers(decoder: DecoderConfig) -> int:
    return sum(isinstance(layer.mlp, Mlp) for layer in decoder.layers)


GGUF = replace(
    DENSE, architecture="lfm2moe", config={
        **DENSE.config,
        **EXPERTS.config,
        "num_dense_layers": Count("leading_dense_block_count", 0, _dense_layers, least=0),
        "routed_scaling_factor": Number("expert_weights_scale", 1.0, 1.0, of_experts("factor")),
    },
    tensors=TensorMap((*GGUF_TENSORS.names, (f"{LAYER}mlp.expert_bias", f"{BLOCK}exp_probs_b.bias"))),
    fixed={"expert_gating_func": 2},  # sigmoids
)  # fmt: skip
DEFAULTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "intermediate_size": 7168}
TENSORS = TensorMap((
    *OF_DENSE.names,
    *map_modules(LAYER, LAYER, {
        "mlp.router": "feed_forward.gate",
        "mlp.experts.{}.gate_proj": "feed_forward.experts.{}.w1",
        "mlp.experts.{}.up_proj": "feed_forward.experts.{}.w3",
        "mlp.experts.{}.down_proj": "feed_forward.experts.{}.w2",
    }).names,
    (f"{LAYER}mlp.expert_bias", f"{LAYER}feed_forward.expert_bias"),
))  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an LFM2 config.json with experts."""
    hf = filled(hf, **DEFAULTS)
    if hf.get("tie_embedding") is not None:
        hf["tie_word_embeddings"] = hf["tie_embedding"]
    experts = read_experts(
        {**hf, "hidden_act": "silu"}, "moe_intermediate_size", sigmoid=True,
        renormalise=flag(hf, "norm_topk_prob", True), favours=flag(hf, "use_expert_bias", True),
        factor=number(hf, "routed_scaling_factor", 1.0, *POSITIVE),
    )  # fmt: skip
    dense, layers = count(hf, "num_dense_layers", 2, least=0), count_layers(hf)
    mlp = Mlp(count(hf, "intermediate_size"))
    return read_convolutions(hf, [mlp if index < dense else experts for index in range(layers)], TENSORS)
