"""Small random encoder-decoder checkpoints with the tests' tokenizer, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from tests.models import BEGIN, END, VOCAB_SIZE, write_tokenizer

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB_SIZE}

PART_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def make_t5(noise: float = 0.0, d_model: int = 32, **settings: Any) -> Any:
    """Return a random T5 of transformers in float64; those of other `noise` are near. settings: for generation."""
    return make_model("t5", noise, settings, **{**SIZES, "d_model": d_model}, feed_forward_proj="gated-gelu")


def make_bart(family: str, **settings: Any) -> Any:
    """Return a random BART, mBART or Marian of transformers in float64, with 64 positions."""
    parts = {f"{part}_{key}": value for part in ("encoder", "decoder") for key, value in PART_SIZES.items()}
    sizes = {"d_model": 32, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "scale_embedding": True}
    return make_model(family, 0.0, {"forced_eos_token_id": END, **settings}, **sizes, **parts)


def make_model(family: str, noise: float, settings: dict[str, Any], **sizes: Any) -> Any:
    """Return a random model of transformers in float64; see `make_t5`."""
    ids = {"decoder_start_token_id": BEGIN, "pad_token_id": BEGIN, "bos_token_id": BEGIN, "eos_token_id": END}
    config = transformers.AutoConfig.for_model(family, **sizes, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
        for name, matrix in model.named_parameters():
            if matrix.dim() > 1 and matrix.requires_grad:
                scale = 0.05 if name.endswith(("q.weight",)) else 0.3
                matrix.data = scale * (torch.randn_like(matrix) + noise * torch.randn_like(matrix))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model.double()


def write_t5(folder: Path, model: Any) -> str:
    """Write a model and the tests' tokenizer, which ends texts with the end token; return the folder as text."""
    model.save_pretrained(folder)
    write_tokenizer(folder)
    path = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    tokenizer.save(path)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    return str(folder)
