"""Writes the model of a GGUF file as a folder in Hugging Face's format, with weights that are floating-point numbers.

A folder can be inflated and changed by noise; blocks of small integers can't.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from speculant.gguf_file import GgufFile
from speculant.lab.checkpoints import save_tensors
from speculant.models import CheckpointFiles, read_description, read_plain
from speculant.text import read_gguf_tokenizer


def write_decoded(source: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model of a GGUF file to an existing folder, with its tokenizer and chat template.

    Memory holds all weights. Raises ModelError for a file that can't be read.
    """
    files = CheckpointFiles.open(source)
    weights, tokenizer = files.weights, read_gguf_tokenizer(GgufFile.open(source).metadata)
    tensors = {name: read_plain(weights, name).to(dtype) for name in weights.names()}
    save_tensors(tensors, read_description(files.config).tensors, folder / "model.safetensors")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {**files.config, "dtype": str(dtype).removeprefix("torch.")}
    for name, content in (("tokenizer_config.json", tokenizer.settings), ("config.json", config)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")  # config.json last: without it nothing loads
