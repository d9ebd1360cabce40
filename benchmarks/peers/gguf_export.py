"""Writes a Llama checkpoint with a byte-level tokenizer as a GGUF file, like llama.cpp's own converter.

    python -m benchmarks.peers.gguf_export FOLDER FILE

That converter knows tokenizers by name, and the embedded pair's is not among them. Needs the package `gguf`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def export(folder: Path, file: Path) -> None:
    """Write matrices in bfloat16 and norms in float32. Memory holds one file of the checkpoint."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    _add_sizes(writer, config, folder.name)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    for part in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            if name != "lm_head.weight" or not config.get("tie_word_embeddings"):
                _add(writer, gguf_name(name), arrange(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_TENSORS[part]}.weight"


def _add_sizes(writer: Any, config: Mapping[str, Any], name: str) -> None:
    import gguf

    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Add the vocabulary; rows of the head beyond it get names that no text has."""
    import gguf

    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    added = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    kinds, tokens = [], []
    for number in range(config["vocab_size"]):
        tokens.append(added.get(number, by_id.get(number, f"[PAD{number}]")))
        known = gguf.TokenType.NORMAL if number in by_id else gguf.TokenType.UNUSED
        kinds.append(gguf.TokenType.CONTROL if number in added else known)
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)


def arrange(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Order the rows of queries and keys as llama.cpp rotates them: pairs side by side, not half a head apart."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.view(config[heads], 2, config["head_dim"] // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add(writer: Any, name: str, tensor: Tensor) -> None:
    import gguf

    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    stored = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=gguf.GGMLQuantizationType.BF16)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
