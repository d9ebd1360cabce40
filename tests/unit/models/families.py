"""Small random checkpoints of every model family, made by transformers, and the sessions that tests run on them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import logging

from speculant import plugins
from speculant.cache import slotted_cache
from speculant.kernels import usable_sets
from speculant.lab.checkpoints import save_tensors
from speculant.models import CausalLM, Decoder, EncodesSources, SequenceInput, build_batch, load_model
from speculant.types import DraftTree

logging.disable_progress_bar()
logging.set_verbosity_error()


def _delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Compute a gated delta rule token by token, in the type of `g`: transformers' own has float32 alone."""
    query, key = (modeling_qwen3_5.l2norm(each.to(g.dtype)) for each in (query, key))
    query, key = (each.repeat_interleave(value.shape[2] // each.shape[2], 2) for each in (query, key))
    state, out = g.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[-1]), list[Tensor]()
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        added = (value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * added[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / query.shape[-1] ** 0.5)
    return torch.stack(out, 1).to(value.dtype), state


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, dt_bias: Tensor,  # noqa: N803
    dt_limit: tuple[float, float], return_final_states: bool, **_: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Compute Mamba 2 token by token, in the type of `x`: transformers' own has float32 alone."""
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))  # noqa: N806
    dt = torch.nn.functional.softplus(dt + dt_bias).clamp(*dt_limit)
    state, out = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[-1]), list[Tensor]()
    for t in range(x.shape[1]):
        state = state * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    result = torch.stack(out, 1).to(x.dtype)
    return (result, state) if return_final_states else result


class _Wide(TorchFunctionMode):
    """Keeps numbers of float64 that transformers' norms, routers and softmax turn into float32.

    Angles and distances are of float32 from the beginning, as in our models.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args, given = map(_wide, args), {name: _wide(each) for name, each in given.items()}
        return func(*args, **given)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def _widen(oracle: PreTrainedModel) -> PreTrainedModel:
    """Let a model of float64 compute in it alone."""
    forward = oracle.forward

    @functools.wraps(forward)
    def wide(*args: Any, **settings: Any) -> Any:
        with _Wide():
            return forward(*args, **settings)

    oracle.forward = wide
    return oracle


# Random weights enlarge errors of rounding in states, and transformers' rule for many tokens has larger ones.
for _module in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
    vars(_module)["torch_chunk_gated_delta_rule"] = _delta_rule
vars(modeling_granitemoehybrid)["mamba2_chunk_scan"] = _scan

NATIVE = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,  # generation in the tests has a fixed length
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6}

FULL, SLIDES, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 12}
DELTA = {
    "head_dim": 24, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "num_local_experts": 0, "shared_intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_state": 12, "pad_token_id": 0,
}  # fmt: skip
FAVOURED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "pad_token_id": 0,
}
SHORT = {"block_auto_adjust_ff_dim": False, "pad_token_id": 0}
GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "num_hidden_layers": 4, "pad_token_id": 0,
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 300,
}  # fmt: skip
SCALED = {"rope_theta": 1000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
PADDED = {"pad_token_id": 0}  # theirs are beyond the small vocabulary
MULTIPLIED = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.5,
}  # fmt: skip

LONG_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
SHARED = {**EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {  # texts of up to 64 tokens; tests/exactness/test_restarts.py has longer ones
    "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.3, 2.0], "long_factor": [2.0, 4.0, 9.0]},
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
}

T5 = {**PADDED, "num_layers": 3, "d_ff": 48, "d_kv": 8, "decoder_start_token_id": 0}

BART = {
    "pad_token_id": 1, "decoder_start_token_id": 2, "decoder_layers": 3, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 512,
}  # fmt: skip
MARIAN = {**BART, "activation_function": "swish", "scale_embedding": True}

SOURCE = (7, 30, 2, 2, 51, 19, 44, 3, 60, 11, 7, 8, 9)  # what encoder-decoder models read if a test names nothing else
ENCODER_DECODERS = tuple(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
STATES = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
)  # some of their layers have a state in place of attention
REPEATING = ("bart", "mbart", "marian")  # with random weights, the likeliest token is mostly the last one: tied tables

# A family without an entry is tested in its default shape. transformers knows most model types, and is the oracle.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "llama2": {"num_key_value_heads": 4},
        "llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "llama3.2": {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
        "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        "dynamic": {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 32,
        },
        "yarn": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 3.0}, "head_dim": 12},
        "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    },
    "mistral": {
        "v0.2": {"sliding_window": None},
        "v0.1": {"sliding_window": 6},
        "nemo": {"sliding_window": None, "head_dim": 12},
    },
    "qwen2": {
        "plain": {},
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        "windows": {**SLIDING, "max_window_layers": 1},
        "layer_types": {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
    "qwen3": {
        "plain": {"head_dim": 16},
        "tied": {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
        "windows": {"head_dim": 16, **SLIDING, "max_window_layers": 2},
    },
    "qwen3_5_text": {
        "plain": {**DELTA, "full_attention_interval": 3},
        "tied": {
            **DELTA,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 6,
            "layer_types": [LINEAR, FULL, LINEAR],
        },
        "one to one": {
            **DELTA,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "num_hidden_layers": 5,
            "full_attention_interval": 2,
            "num_key_value_heads": 1,
        },
        "biases": {**DELTA, "attention_bias": True, "layer_types": [FULL, LINEAR, LINEAR], "head_dim": 16},
    },
    "qwen3_5_moe_text": {
        "plain": {**DELTA, **SHARED, "full_attention_interval": 3},
        "biases": {
            **DELTA,
            **SHARED,
            "shared_expert_intermediate_size": 100,
            "attention_bias": True,
            "layer_types": [FULL, LINEAR, LINEAR],
        },
    },
    "lfm2": {
        "plain": {**SHORT, "layer_types": [CONV, FULL, CONV]},
        "untied": {
            **SHORT,
            "layer_types": [FULL, CONV, FULL],
            "conv_L_cache": 4,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
        },
        "biases": {**SHORT, "layer_types": [FULL, CONV, CONV], "conv_bias": True, "conv_L_cache": 2},
    },
    "granitemoehybrid": {
        "plain": {
            **MAMBA,
            **MULTIPLIED,
            "residual_multiplier": 1.5,
            "layer_types": [LINEAR, FULL, LINEAR],
            "tie_word_embeddings": True,
        },
        "groups": {
            **MAMBA,
            "layer_types": [FULL, LINEAR, LINEAR],
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.3, 1.0],
            "attention_bias": True,
        },
        "rotated": {**MAMBA, "layer_types": [LINEAR, FULL, FULL], "position_embedding_type": "rope", "mamba_expand": 1},
        "experts": {
            **MAMBA,
            **MULTIPLIED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "layer_types": [LINEAR, FULL, LINEAR],
            "tie_word_embeddings": True,
        },
    },
    "qwen3_next": {
        "plain": {**DELTA, **SHARED, "full_attention_interval": 3},
        "mixed": {
            **DELTA,
            **SHARED,
            "linear_num_value_heads": 6,
            "mlp_only_layers": [0],
            "norm_topk_prob": False,
            "layer_types": [LINEAR, FULL, LINEAR],
            "attention_bias": True,
        },
    },
    "lfm2_moe": {
        "plain": {**FAVOURED, "layer_types": [CONV, FULL, CONV]},
        "sigmoids": {
            **FAVOURED,
            "layer_types": [FULL, CONV, CONV],
            "num_dense_layers": 0,
            "norm_topk_prob": False,
            "use_expert_bias": False,
            "routed_scaling_factor": 1.5,
            "num_key_value_heads": 1,
        },
    },
    "gemma2": {
        "plain": {**GEMMA, "sliding_window": 6},
        "untied": {**GEMMA, "sliding_window": 200, "tie_word_embeddings": False, "num_key_value_heads": 1},
        "no caps": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    },
    "gemma3_text": {
        "plain": {**GEMMA, "query_pre_attn_scalar": 3, "sliding_window": 6, "layer_types": [SLIDES, FULL, SLIDES]},
        "old": {
            **GEMMA,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "rope_local_base_freq": 100.0,
            "tie_word_embeddings": False,
            **SCALED,
        },
        "nested": {
            **GEMMA,
            "sliding_window": 9,
            "rope_parameters": {FULL: YARN, SLIDES: {"rope_type": "default", "rope_theta": 100.0}},
            "layer_types": [FULL, SLIDES, FULL],
        },
        "capped": {
            **GEMMA,
            "sliding_window": 7,
            "final_logit_softcapping": 5.0,
            "attn_logit_softcapping": 0.5,  # without an effect
            "attention_bias": True,
        },
    },
    "gemma4_text": {
        "plain": {**GEMMA4, "layer_types": [SLIDES, FULL, SLIDES, FULL], "tie_word_embeddings": False},
        "shared": {
            **GEMMA4,
            "hidden_size_per_layer_input": 8,
            "num_hidden_layers": 7,
            "layer_types": [SLIDES, SLIDES, FULL] * 2 + [FULL],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
        "dense": {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "use_bidirectional_attention": "vision",
        },
    },
    "phi3": {
        "plain": {**PADDED, "sliding_window": None},
        "mini": {
            **PADDED,
            "sliding_window": 6,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
            "head_dim": 8,
        },
        "one key": {**PADDED, "num_key_value_heads": 1},
        "longrope": {**PADDED, **LONGROPE},
    },
    "smollm3": {
        "plain": {**PADDED, "num_hidden_layers": 5},
        "listed": {**PADDED, "no_rope_layers": [1, 0, 1], **SLIDING, "tie_word_embeddings": False},
        "biases": {**PADDED, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True},
    },
    "granite": {
        "plain": {**PADDED, **MULTIPLIED},
        "tied": {**PADDED, **MULTIPLIED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    },
    "olmo2": {"plain": {}, "biases": {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}},
    "olmo3": {
        "plain": {"sliding_window": 6, "num_hidden_layers": 5},
        "listed": {"sliding_window": 1, "layer_types": [FULL, SLIDES, FULL], "tie_word_embeddings": True},
        "yarn": {"sliding_window": 6, "rope_theta": 1e4, "rope_scaling": YARN},
    },
    "ministral3": {
        "short": {"head_dim": 8, "rope_parameters": {**YARN, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
        "plain": {"head_dim": 8},
        "tied": {"head_dim": 12, "sliding_window": 6, "tie_word_embeddings": True},
    },
    "starcoder2": {
        "plain": {"sliding_window": 6},
        "untied": {"use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1},
    },
    "gpt2": {
        "plain": {"n_inner": 40},
        "untied": {"tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "gelu"},
    },
    "gpt_neox": {
        "pythia": {},
        "serial": {"use_parallel_residual": False, "rotary_pct": 1.0, "tie_word_embeddings": True},
        "unbiased": {"attention_bias": False, "rotary_pct": 0.7, "hidden_act": "relu"},
    },
    "cohere": {
        "plain": {**PADDED, "logit_scale": 0.7},
        "untied": {**PADDED, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
    },
    "qwen3_moe": {
        "plain": {**EXPERTS, "moe_intermediate_size": 24, "head_dim": 16, "norm_topk_prob": True},
        "mixed": {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "head_dim": 8,
            "mlp_only_layers": [1],
            **SLIDING,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
        "every second": {**EXPERTS, "moe_intermediate_size": 40, "decoder_sparse_step": 2},
    },
    "mixtral": {
        "plain": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "windows": {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 6, "tie_word_embeddings": True},
        "one expert": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 12},
    },
    "olmoe": {
        "plain": {**PADDED, **EXPERTS},
        "renormalised": {
            **PADDED,
            **EXPERTS,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    },
    "gpt_oss": {
        "plain": {**EXPERTS, "head_dim": 16, "sliding_window": 6, "rope_parameters": LONG_YARN},
        "unbiased": {
            **EXPERTS,
            "head_dim": 8,
            "attention_bias": False,
            "sliding_window": 5,
            "layer_types": [FULL, SLIDES, FULL],
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    },
    "opt": {
        "plain": {**PADDED, "ffn_dim": 40},
        "untied": {**PADDED, "ffn_dim": 40, "enable_bias": False, "tie_word_embeddings": False},
    },
    "t5": {
        "flan": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "v1.0": {**T5, "num_decoder_layers": 2, "relative_attention_max_distance": 20},
        "narrow": {**T5, "d_kv": 5, "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 9},
    },
    "mt5": {"plain": T5, "ungated": {**T5, "num_decoder_layers": 3, "feed_forward_proj": "gelu"}},
    "bart": {
        "plain": BART,
        "untied": {**BART, "encoder_layers": 1, "tie_word_embeddings": False, "scale_embedding": True},
        "deep": {**BART, "decoder_layers": 4, "activation_function": "relu"},
    },
    "mbart": {"plain": {**BART, "scale_embedding": True}, "deep": {**BART, "decoder_layers": 4}},
    "marian": {
        "plain": MARIAN,
        "untied": {**MARIAN, "scale_embedding": False, "tie_word_embeddings": False, "encoder_layers": 2},
    },
    "umt5": {"plain": T5, "near": {**T5, "relative_attention_num_buckets": 6, "relative_attention_max_distance": 8}},
}


def cases(*, with_encoders: bool = False) -> list[tuple[str, str]]:
    """Return (family, variant) for every family there is a plugin for, encoder-decoders only if asked for."""
    return [
        (family, variant)
        for family in plugins.names("speculant.models")
        for variant in VARIANTS.get(family, {"default": {}})
        if with_encoders or family not in ENCODER_DECODERS
    ]


# Families unlike each other, for tests that need no more of them in `make test`: rotary positions and learned ones,
# layers of different sizes, windows, experts and states.
FEW = ("llama", "gemma4_text", "gpt_oss", "gpt2", "t5", "qwen3_5_text")


def thinned_cases(
    *before: str,
    marks: Sequence[pytest.MarkDecorator] = (),
    families: Collection[str] | None = None,
    with_encoders: bool = False,
) -> list[ParameterSet]:
    """Return all cases as parameters (*before, family, variant).

    Not slow: the first of each family, or of each of `families`.
    """
    made, seen = [], set[str]()
    for family, variant in cases(with_encoders=with_encoders):
        quick = family not in seen and (families is None or family in families)
        own = marks if quick else [*marks, pytest.mark.slow]
        made.append(pytest.param((*before, family, variant), id="-".join([*before, family, variant]), marks=own))
        seen.add(family)
    return made


class CaseWith(NamedTuple):
    """A variant of a family with another value, so that a test marked `covering` selects from all three."""

    family: str
    variant: str
    value: str


def cases_with(
    values: Sequence[str], families: Collection[str] | None = None, *, with_encoders: bool = False
) -> list[ParameterSet]:
    """Return all cases with each of these values as a parameter; with_encoders: see `cases`.

    Not slow: the first variant of each family with one value, or with more where there are more values than families,
    so that each value occurs; of these, those of `families` if they are given.
    """
    found, thinned = (
        cases(with_encoders=with_encoders),
        thinned_cases(families=families, with_encoders=with_encoders),
    )
    made, firsts = [], dict.fromkeys(family for family, _ in found)
    places = {family: place for place, family in enumerate(firsts)}
    for case, own in ((case, each.marks) for case, each in zip(found, thinned, strict=True)):
        for number, value in enumerate(values):
            taken = number % len(places) == places[case[0]] % len(values)
            marks = own if taken else [pytest.mark.slow]
            made.append(pytest.param(CaseWith(*case, value), id="-".join([*case, value]), marks=marks))
    return made


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and, read from its files, in ours.

    oracle: None = transformers has no model of this type, and tests that compare with it are skipped.
    """

    oracle: PreTrainedModel | None
    ours: CausalLM
    folder: Path
    kernels: str = "reference"

    @property
    def theirs(self) -> PreTrainedModel:
        """Transformers' model."""
        if self.oracle is None:
            pytest.skip("transformers has no model of this type")
        return self.oracle

    def in_float64(self) -> Pair:
        """Return both in float64, so that differences are of the program and not of the numbers."""
        wide = {"dtype": torch.float64, "experts_implementation": "eager"}  # other ones have no float64
        oracle = self.oracle and _widen(type(self.oracle).from_pretrained(self.folder, **wide).eval())
        ours = load_model(str(self.folder), dtype="float64").model
        return Pair(oracle, ours, self.folder)

    def on_native(self) -> Pair:
        """Return transformers' model beside ours on the native kernels, in float32."""
        ours = load_model(str(self.folder), dtype="float32", kernels="native").model
        return Pair(self.oracle, ours, self.folder, "native")

    def in_bfloat16(self) -> CausalLM:
        """Return ours in bfloat16, on the same kernels."""
        return load_model(str(self.folder), dtype="bfloat16", kernels=self.kernels).model

    @torch.inference_mode()
    def reference(self, tokens: list[int], source: Sequence[int] = SOURCE) -> Tensor:
        """Return transformers' logits [len(tokens), V] of one sequence; source: that of an encoder-decoder model."""
        rows = torch.tensor([tokens])
        encoded = {"input_ids": torch.tensor([source]), "decoder_input_ids": rows}
        logits: Tensor = self.theirs(**(encoded if self.ours.needs.source else {"input_ids": rows})).logits[0]
        return logits


def make_pair(folder: Path, family: str, variant: str, *, spread: bool = True) -> Pair:
    """Make a random model in transformers, or in ours if it has none, save it, and load it with load_model.

    spread: with the weights of `spread_weights`, not with those that transformers draws.
    """
    settings = {**SMALL, **VARIANTS.get(family, {}).get(variant, {})}
    if family not in CONFIG_MAPPING:
        write_own(folder, family, settings)
        return Pair(None, load_model(str(folder)).model, folder)
    made_by = AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else AutoModelForCausalLM
    theirs = made_by.from_config(AutoConfig.for_model(family, **settings)).eval()
    if spread:
        spread_weights(theirs)
    theirs.save_pretrained(folder)
    return Pair(theirs, load_model(str(folder)).model, folder)


MakePair = Callable[[str, str, str], Pair]


def loading_pairs(folders: pytest.TempPathFactory) -> MakePair:
    """Return what loads a family's variant on a backend, once; "float64" is the reference with wide numbers.

    "steady" is the native backend beside transformers' model with wide numbers, whose texts no rounding changes.
    """

    @functools.cache
    def load(backend: str, family: str, variant: str) -> Pair:
        if backend == "reference":
            return make_pair(folders.mktemp("checkpoint"), family, variant)
        if backend == "float64":
            return load("reference", family, variant).in_float64()
        return load("float64" if backend == "steady" else "reference", family, variant).on_native()

    return load


def on_backends(*backends: str, families: Collection[str] | None = None) -> list[ParameterSet]:
    """Return the parameters of every variant on every one of these backends; only `families` are quick, if given."""
    return [
        each
        for backend in backends
        for each in thinned_cases(
            backend, marks=[NATIVE] if backend == "native" else (), families=families, with_encoders=True
        )
    ]


def write_variant(folder: Path, family: str, variant: str) -> Path:
    """Write a random checkpoint of a variant without transformers; return its folder."""
    write_own(folder, family, {**SMALL, **VARIANTS.get(family, {}).get(variant, {})})
    return folder


def write_own(folder: Path, family: str, settings: dict[str, Any]) -> None:
    """Write a random checkpoint of a family, with the names that its tensor map has."""
    hf = {**settings, "model_type": family}
    config = plugins.load("speculant.models", family).read_config(hf)
    model = Decoder(config)
    spread_weights(model)
    save_tensors(dict(model.named_parameters()), config.tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))


@torch.no_grad()
def spread_weights(model: torch.nn.Module) -> None:
    """Draw every parameter, norms and biases too, so that none is at a value that hides it.

    An encoder and a decoder get the same table of tokens, also where transformers has two. Queries are smaller where
    scores are not scaled (T5): otherwise the largest score alone counts, and rounding grows.
    """
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3
        noise = noise * 0.15 if name.endswith("Attention.q.weight") else noise
        if not parameter.requires_grad:  # it is computed
            continue
        is_scale = parameter.ndim == 1 and name.endswith("weight")  # of a norm
        parameter.copy_(1 + noise if is_scale else noise)
    tables = ("shared.weight", "coder.embed_tokens.weight")
    first, *others = [each for name, each in model.named_parameters() if name.endswith(tables)] or [torch.empty(0)]
    for each in others:
        each.copy_(first)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("expert_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("final_logits_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Return token ids below the small vocabulary's size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (count,), generator=generator).tolist()


class Session:
    """A model with a cache, fed step by step. sources: of sequences, for an encoder-decoder model; others have SOURCE.

    A sequence's source is encoded before its first pass.
    """

    def __init__(
        self,
        model: CausalLM,
        num_slots: int = 4,
        max_len: int = 128,
        sources: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.model, self._sources = model, sources
        self.cache = slotted_cache(model.cache_shape, num_slots * (2 if model.needs.source else 1), max_len)

    @torch.inference_mode()
    def feed(self, *feeds: SequenceInput) -> Tensor:
        """Run one pass and return the logits [T, V] of all its rows."""
        if self.model.needs.source:
            self.encode(*(feed.seq_id for feed in feeds))
            feeds = tuple(feed._replace(source=self._source_id(feed.seq_id)) for feed in feeds)
        batch = build_batch(feeds, self.cache, torch.device("cpu"))
        logits = self.model.logits(self.model.forward(batch, self.cache.storage).last)
        self.cache.check()
        return logits

    @torch.inference_mode()
    def encode(self, *seq_ids: int) -> Tensor | None:
        """Encode the sources of sequences that are not encoded, in one pass: [T, hidden]; None = all are encoded."""
        missing = {self._source_id(seq_id): self._sources.get(seq_id, SOURCE) for seq_id in seq_ids}
        inputs = [
            SequenceInput(source, list(tokens), DraftTree.empty())
            for source, tokens in missing.items()
            if not self.cache.length(source)
        ]
        assert isinstance(self.model, EncodesSources)
        if not inputs:
            return None
        return self.model.encode(build_batch(inputs, self.cache, torch.device("cpu")), self.cache.storage)

    @staticmethod
    def _source_id(seq_id: int) -> int:
        return -1 - seq_id

    def extend(self, tokens: list[int], seq_id: int = 0) -> Tensor:
        """Feed committed tokens of one sequence."""
        return self.feed(SequenceInput(seq_id, tokens, DraftTree.empty()))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Generate one token a pass."""
        tokens, logits = [], self.extend(prompt)
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = self.extend(tokens[-1:])
        return tokens
