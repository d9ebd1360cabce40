"""How llama.cpp's conversion stores each family's checkpoints: names, order of rows, and metadata.

Shares nothing with `speculant.models`, which reads the files, so that tests can compare the two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_EXPERT = re.compile(r"experts\.[0-9]+\.")  # whose tensors are stacked
Config = Mapping[str, Any]
Entries = dict[str, Any]

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}


@dataclass(frozen=True)
class GgufLayout:
    """The layout of a family.

    whole: names outside of layers. parts: names within a layer. layers: the name before a layer's number; blocks: the
    same in the file. entries: returns the metadata. paired: rows of queries and keys are interleaved. shifted: norms
    have 1 added. turned: matrices are transposed. regrouped: queries of all heads come first, then keys, then values.
    encoder: the layout of the encoder's layers.
    """

    architecture: str
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS)
    layers: str = "model.layers"
    blocks: str = "blk"
    entries: Callable[[Config], Entries] = lambda _: {}
    paired: bool = False
    shifted: bool = False
    turned: bool = False
    regrouped: bool = False
    encoder: GgufLayout | None = None

    def stored_name(self, name: str) -> str:
        """Return the name in GGUF of a tensor of a checkpoint."""
        part, _, kind = name.rpartition(".")
        if part in self.whole:
            return f"{self.whole[part]}.{kind}"
        if self.encoder and part.startswith(self.encoder.layers):
            return self.encoder.stored_name(name)
        layer, _, part = part.removeprefix(f"{self.layers}.").partition(".")
        return f"{self.blocks}.{layer}.{self.parts[_EXPERT.sub('experts.', part)]}.{kind}"

    def stored(self, name: str, tensor: Tensor, config: Config) -> Tensor:
        """Return a checkpoint's tensor as the file has it."""
        if self.shifted and name.endswith("norm.weight"):
            return tensor + 1
        order = self._order(name, len(tensor), config)
        tensor = tensor if order is None else tensor[order]
        return tensor.T.contiguous() if self.is_turned(name) else tensor

    def loaded(self, name: str, tensor: Tensor, config: Config) -> Tensor:
        """Return a file's tensor as the checkpoint has it; the inverse of `stored`."""
        if self.shifted and name.endswith("norm.weight"):
            return tensor - 1
        tensor = tensor.T if self.is_turned(name) else tensor
        order = self._order(name, len(tensor), config)
        if order is None:
            return tensor
        out = torch.empty_like(tensor)
        out[order] = tensor
        return out

    def is_turned(self, name: str) -> bool:
        """Whether the file has a tensor transposed."""
        return self.turned and any(f".{part}.weight" in name for part in ("c_attn", "c_proj", "c_fc"))

    def _order(self, name: str, rows: int, config: Config) -> Tensor | None:
        """Return the order of a tensor's rows in the file; None = as they are."""
        heads = config.get("num_attention_heads", 0)
        own = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
        of = next((count for part, count in own.items() if f".{part}." in name), 0)
        if self.paired and of:  # the halves of each head, interleaved
            return torch.arange(rows).view(of, 2, -1).transpose(1, 2).reshape(-1)
        if self.regrouped and "query_key_value" in name:
            return torch.arange(rows).view(heads, 3, -1).transpose(0, 1).reshape(-1)
        return None


def _rope(config: Config) -> Mapping[str, Any]:
    """Return the rotary settings of layers with full attention."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own: Mapping[str, Any] = rope.get("full_attention", rope)
    return own


def _theta(config: Config) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _rotated(config: Config) -> int:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))


def _sizes(config: Config) -> Entries:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
    }


def _scaling(config: Config) -> Entries:
    """Return the entries for the scaling of rotary positions; others become tensors."""
    rope = _rope(config)
    kind = rope.get("rope_type")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope":
        return {"rope.scaling.type": "longrope"}
    if kind != "yarn":
        return {}
    own = {
        "attention_factor": "rope.scaling.yarn_attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        **{stored: float(rope[name]) for name, stored in own.items() if rope.get(name) is not None},
    }


def _common(config: Config) -> Entries:
    """Return the metadata that most families have."""
    rope = config.get("rope_parameters") or {}
    eps = next((config[key] for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") if key in config), None)
    found = {
        **_sizes(config),
        "attention.head_count_kv": config["num_key_value_heads"],
        **_scaling(config),
        "rope.freq_base": _theta(config),
    }
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if eps is None:
        found["attention.layer_norm_rms_epsilon"] = float(config.get("rms_norm_eps", 1e-6))
    else:
        found["attention.layer_norm_epsilon"] = float(eps)
    if config.get("head_dim"):
        found |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    return found


def _llama(config: Config) -> Entries:
    return {**_common(config), "vocab_size": config["vocab_size"], "rope.dimension_count": _rotated(config)}


def _gemma2(config: Config) -> Entries:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    found = {**_common(config), "attention.sliding_window": config["sliding_window"]}
    del found["rope.freq_base"]
    return found | {name: config[name] for name in names if config[name] is not None}


def _gemma3(config: Config) -> Entries:
    found = {**_common(config), "attention.sliding_window": config["sliding_window"]}
    return found | (
        {"final_logit_softcapping": config["final_logit_softcapping"]} if config["final_logit_softcapping"] else {}
    )


def _phi3(config: Config) -> Entries:
    rope = _rope(config)
    original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
    found = {
        **_common(config),
        "rope.dimension_count": _rotated(config),
        "rope.scaling.original_context_length": original,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    found.pop("rope.scaling.type", None)
    if rope.get("long_factor"):
        scale = config["max_position_embeddings"] / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return found


def _granite(config: Config) -> Entries:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {**_llama(config), **{stored: float(config[own]) for own, stored in names.items() if config[own]}}


def _cohere(config: Config) -> Entries:
    return {**_common(config), "rope.scaling.type": "none", "logit_scale": float(config["logit_scale"])}


def _olmo(config: Config) -> Entries:
    if "sliding_window" not in config:
        return _common(config)
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": sliding}
    return {**_common(config), **own}


def _mistral3(config: Config) -> Entries:
    rope = _rope(config)
    own = {
        "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
        "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
    }
    return {**_llama(config), **own}


def _experts(config: Config) -> Entries:
    found = {
        "expert_count": config.get("num_local_experts") or config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }
    if "moe_intermediate_size" in config:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def _gpt2(config: Config) -> Entries:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": config.get("n_inner") or 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _gpt_neox(config: Config) -> Entries:
    return {
        **_sizes(config),
        "rope.dimension_count": _rotated(config),
        "use_parallel_residual": config["use_parallel_residual"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }


def _t5(config: Config) -> Entries:
    found = {
        "context_length": config.get("n_positions", 512),
        "embedding_length": config["d_model"],
        "feed_forward_length": config["d_ff"],
        "block_count": config["num_layers"],
        "attention.head_count": config["num_heads"],
        "attention.key_length": config["d_kv"],
        "attention.value_length": config["d_kv"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "attention.relative_buckets_count": config["relative_attention_num_buckets"],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "decoder_start_token_id": config["decoder_start_token_id"],
    }
    decoder = config.get("num_decoder_layers")
    return found if decoder is None else {**found, "decoder_block_count": decoder}


_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_ROUTED = {**_PARTS, "mlp.gate": "ffn_gate_inp", **{f"mlp.experts.{own}": name for own, name in _EXPERTS.items()}}
_MIXTRAL = {
    **_PARTS,
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{f"block_sparse_moe.experts.w{i}": f"ffn_{name}_exps" for i, name in ((1, "gate"), (2, "down"), (3, "up"))},
}
_GEMMA_PARTS = {**_PARTS, **_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_OLMO = GgufLayout("olmo2", parts={**_PARTS, **_AFTER}, entries=_olmo)
_T5_ATTENTION = {
    "layer.0.layer_norm": "attn_norm",
    **{f"layer.0.SelfAttention.{name}": f"attn_{name}" for name in "qkvo"},
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
}
_T5_CROSS = {
    "layer.1.layer_norm": "cross_attn_norm",
    **{f"layer.1.EncDecAttention.{name}": f"cross_attn_{name}" for name in "qkvo"},
}
_T5_MLP = {"wi_0": "ffn_gate", "wi_1": "ffn_up", "wi": "ffn_up", "wo": "ffn_down"}


def _t5_parts(mlp: int, other: Mapping[str, str]) -> dict[str, str]:
    """Return the names within a layer; mlp: the number of its feed-forward block."""
    inner = {f"layer.{mlp}.DenseReluDense.{name}": stored for name, stored in _T5_MLP.items()}
    return {**_T5_ATTENTION, **other, f"layer.{mlp}.layer_norm": "ffn_norm", **inner}


_T5 = GgufLayout(
    "t5",
    whole={
        "shared": "token_embd",
        "lm_head": "output",
        "decoder.final_layer_norm": "dec.output_norm",
        "encoder.final_layer_norm": "enc.output_norm",
    },
    parts=_t5_parts(2, _T5_CROSS),
    layers="decoder.block",
    blocks="dec.blk",
    entries=_t5,
    encoder=GgufLayout("t5", parts=_t5_parts(1, {}), layers="encoder.block", blocks="enc.blk"),
)
LAYOUTS = {
    "t5": _T5,
    "umt5": _T5,
    "llama": GgufLayout("llama", paired=True, entries=_llama),
    "mistral": GgufLayout("mistral3", paired=True, entries=_llama),  # as in Mistral 3; earlier ones are stored as Llama
    "qwen2": GgufLayout("qwen2", entries=_common),
    "qwen3": GgufLayout("qwen3", entries=_common),
    "qwen3_moe": GgufLayout("qwen3moe", parts=_ROUTED, entries=lambda config: {**_common(config), **_experts(config)}),
    "olmoe": GgufLayout("olmoe", parts=_ROUTED, entries=lambda config: {**_common(config), **_experts(config)}),
    "mixtral": GgufLayout(
        "llama", parts=_MIXTRAL, paired=True, entries=lambda config: {**_llama(config), **_experts(config)}
    ),
    "gemma2": GgufLayout("gemma2", parts=_GEMMA_PARTS, shifted=True, entries=_gemma2),
    "gemma3_text": GgufLayout("gemma3", parts=_GEMMA_PARTS, shifted=True, entries=_gemma3),
    "phi3": GgufLayout(
        "phi3",
        parts={**_PARTS, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
        entries=_phi3,
    ),
    "smollm3": GgufLayout("smollm3", paired=True, entries=_llama),
    "granite": GgufLayout("granite", paired=True, entries=_granite),
    "cohere": GgufLayout("command-r", entries=_cohere),  # its checkpoints' rows are interleaved too
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "ministral3": GgufLayout("mistral3", paired=True, entries=_mistral3),
    "starcoder2": GgufLayout(
        "starcoder2", parts={**_PARTS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}, entries=_common
    ),
    "gpt2": GgufLayout(
        "gpt2",
        whole={
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        parts={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        layers="transformer.h",
        turned=True,
        entries=_gpt2,
    ),
    "gpt_neox": GgufLayout(
        "gptneox",
        whole={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
        },
        parts={
            "input_layernorm": "attn_norm",
            "attention.query_key_value": "attn_qkv",
            "attention.dense": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        layers="gpt_neox.layers",
        regrouped=True,
        entries=_gpt_neox,
    ),
}


def described(config: Config) -> Entries:
    """Return the metadata of a checkpoint."""
    layout = LAYOUTS[config["model_type"]]
    architecture = layout.architecture
    own = {f"{architecture}.{key}": value for key, value in layout.entries(config).items()}
    return {"general.architecture": architecture, **own}


def rope_tensors(config: Config) -> dict[str, np.ndarray]:
    """Return the tensors of factors that some scalings of rotary positions have."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
        return {name: np.array(rope[key], np.float32) for name, key in names.items()}
    if rope.get("rope_type") != "llama3":
        return {}
    rotated = _rotated(config)
    lengths = 2 * math.pi * _theta(config) ** (np.arange(0, rotated, 2) / rotated)
    low, high = (rope["original_max_position_embeddings"] / rope[f"{name}_freq_factor"] for name in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / lengths - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths < high, 1.0, np.where(lengths > low, rope["factor"], between))
    return {"rope_freqs.weight": factors.astype(np.float32)}


def stored_tensors(names: Iterable[str], layout: GgufLayout) -> dict[str, list[str]]:
    """Return a checkpoint's tensors by their names in the file; several of one name are the matrices of experts."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=numbered):
        found.setdefault(layout.stored_name(name), []).append(name)
    return found


def numbered(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the values of their numbers."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in name.split(".")]
