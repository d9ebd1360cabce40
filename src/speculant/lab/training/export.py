"""Writes a trained model as a folder in Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from speculant.lab.checkpoints import save_tensors
from speculant.lab.training.tokenizer import END_OF_TEXT
from speculant.models import Decoder, read_description

# The model is trained on program text only, so a conversation becomes comments.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '# ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '# assistant:\\n' -}}
{%- endif -%}
"""


def export_model(
    folder: Path, model: Decoder, hf_config: dict[str, Any], tokenizer: Tokenizer, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write config, weights in `dtype` and tokenizer; a tied head is stored once."""
    save_weights(folder, model, hf_config, dtype)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(hf_config["max_position_embeddings"]))


def save_weights(folder: Path, model: Decoder, hf_config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config and weights in `dtype` to a folder, which is made if it is missing.

    hf_config: the config.json of a checkpoint of the model's family, as safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = read_description(hf_config).tensors
    save_tensors(dict(model.named_parameters()), names, folder / "model.safetensors", dtype)
    _write_json(folder / "config.json", {**hf_config, "dtype": str(dtype).removeprefix("torch.")})


def _tokenizer_config(max_positions: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
