"""Tiny random models of families that transformers computes and this package does not, written by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

from tests.models import BEGIN, END, VOCAB_SIZE, write_tokenizer

_SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_GATED = {**_SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
_WINDOW = {**_GATED, "head_dim": 8, "sliding_window": 4}
_GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# By name: the class of the config in transformers, and its values. What is special about each stands beside it.
CACHED: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "stablelm": ("StableLmConfig", {**_GATED, "num_key_value_heads": 4}),  # layer norms, partial rotary
        "cohere2": ("Cohere2Config", _WINDOW),  # parallel blocks, windows, layers without rope, a logit scale
        "gpt_bigcode": ("GPTBigCodeConfig", {**_GPT, "n_positions": 128}),  # learned positions, one key head
        "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),  # the body is a part of the model
        "gemma2": ("Gemma2Config", _WINDOW),  # softcaps of scores and logits
        "gpt_oss": ("GptOssConfig", {**_WINDOW, **_EXPERTS, "intermediate_size": 32}),  # sinks, experts
        "llama4_text": ("Llama4TextConfig", {**_WINDOW, "intermediate_size_mlp": 64, "attention_chunk_size": 4,
                                             "num_local_experts": 2}),  # attention in chunks
        "deepseek_v2": ("DeepseekV2Config", {**_GATED, **_LATENT, "num_key_value_heads": 4, "n_routed_experts": 4,
                                             "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                                             "moe_intermediate_size": 16}),  # values narrower than keys
    }
)  # fmt: skip
RECOMPUTED: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "bloom": ("BloomConfig", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),  # alibi
        "falcon": ("FalconConfig", _SIZES),  # attention of its own
        "mamba": ("MambaConfig", {**_SIZES, "state_size": 4}),  # a recurrent state
        "lfm2": ("Lfm2Config", {**_GATED, "layer_types": ["conv", "full_attention"]}),  # convolutions and attention
    }
)
FAMILIES = {**CACHED, **RECOMPUTED}
_SINGLE = ("gpt_oss", "deepseek_v2")  # whose experts are not computed in float64


def dtype_of(family: str) -> torch.dtype:
    """Return the type that a family's tests compute in: float64, in which no two logits are nearly equal."""
    return torch.float32 if family in _SINGLE else torch.float64


def make_theirs(family: str, seed: int = 0, noise: float = 0.0) -> Any:
    """Return a random model of transformers; those of one seed differ by `noise` alone."""
    kind, values = FAMILIES[family]
    config = getattr(transformers, kind)(**values, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype_of(family)).eval()
        matrices = [each for each in model.parameters() if each.dim() > 1]
        for matrix in matrices:
            nn.init.normal_(matrix, std=0.3)
        for matrix in matrices if noise else ():
            matrix.data += 0.3 * noise * torch.randn_like(matrix)
    return model


def write_theirs(folder: Path, model: Any) -> str:
    """Write a model and the tests' tokenizer into a folder; return it as text."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)
