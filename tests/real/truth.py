"""A GGUF file's model in transformers, with the weights that are decoded from the file, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from torch import Tensor

from speculant.models import read_description
from tests.gguf_blocks import decode
from tests.gguf_models import loaded, stored_names


def load_llama(path: Path) -> Any:
    """Return a LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    facts, weights = _read(path, "llama")
    config = LlamaConfig(
        **_sizes(facts),
        rope_parameters={"rope_type": "default", "rope_theta": facts["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in weights,
    )
    return _filled(LlamaForCausalLM(config), weights)


def load_gemma3(path: Path) -> Any:
    """Return a Gemma3ForCausalLM.

    The file says neither that each sixth layer sees all positions nor the base of the other layers' rotary positions.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    facts, weights = _read(path, "gemma3")
    full = {"rope_type": "default", "rope_theta": facts["rope.freq_base"]}
    config = Gemma3TextConfig(
        **_sizes(facts),
        head_dim=facts["attention.key_length"],
        query_pre_attn_scalar=facts["attention.key_length"],
        sliding_window=facts["attention.sliding_window"],
        layer_types=[
            "sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(facts["block_count"])
        ],
        rope_parameters={"full_attention": full, "sliding_attention": {**full, "rope_theta": 10000.0}},
        tie_word_embeddings=True,
    )
    config._attn_implementation = "eager"
    return _filled(Gemma3ForCausalLM(config), weights)


def _read(path: Path, architecture: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and the decoded tensors of a file."""
    reader = GGUFReader(path)
    facts = {name.removeprefix(f"{architecture}."): field.contents() for name, field in reader.fields.items()}
    return facts, {tensor.name: _decoded(tensor) for tensor in reader.tensors}


def _decoded(tensor: Any) -> Tensor:
    return torch.from_numpy(np.array(decode(tensor.tensor_type.name, np.asarray(tensor.data)), np.float32))


def _sizes(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what the configurations of both families have."""
    return {
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": facts["embedding_length"],
        "intermediate_size": facts["feed_forward_length"],
        "num_hidden_layers": facts["block_count"],
        "num_attention_heads": facts["attention.head_count"],
        "num_key_value_heads": facts["attention.head_count_kv"],
        "max_position_embeddings": facts["context_length"],
        "rms_norm_eps": facts["attention.layer_norm_rms_epsilon"],
    }


def _filled(model: Any, weights: dict[str, Tensor]) -> Any:
    """Return a model with the weights of a file, in the order of rows that it has."""
    config = model.config.to_dict()
    family, of = config["model_type"], read_description(config)
    own = {name: stored for stored, (name,) in stored_names(model.state_dict(), family).items()}
    found = {name: loaded(name, weights[stored], family, of) for name, stored in own.items() if stored in weights}
    assert {own[name] for name in found} == weights.keys()
    missing, unexpected = model.load_state_dict(found, strict=False)
    assert {*missing} <= {"lm_head.weight"}, missing
    assert not unexpected
    return model.eval().requires_grad_(False)
