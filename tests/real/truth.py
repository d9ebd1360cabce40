"""A GGUF file of a llama in transformers, with the weights that the `gguf` package decodes, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor

from tests.gguf_blocks import decode

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load_llama(path: Path) -> Any:
    """Return a LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    facts = {name.removeprefix("llama."): field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = facts["attention.head_count"], facts["attention.head_count_kv"]
    weights = {_name(tensor.name): _weight(tensor, heads, kv_heads) for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["embedding_length"],
        intermediate_size=facts["feed_forward_length"],
        num_hidden_layers=facts["block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=facts["context_length"],
        rms_norm_eps=facts["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert {*missing} <= {"lm_head.weight"}, missing
    assert not unexpected
    return model


def _name(stored: str) -> str:
    """Return transformers' name of a tensor."""
    stem = stored.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{OUTER[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def _weight(tensor: Any, heads: int, kv_heads: int) -> Tensor:
    """Return a tensor in transformers' order of rows: a file has the two halves of each head's rotation interleaved."""
    rows = decode(tensor.tensor_type.name, np.asarray(tensor.data))
    if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
        count = heads if "attn_q" in tensor.name else kv_heads
        rows = rows.reshape(count, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    return torch.from_numpy(np.array(rows, np.float32))
