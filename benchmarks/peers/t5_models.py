"""Encoder-decoder models at the shapes of T5 1.1, with random weights and known successors of tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from speculant.files import cache_folder
from speculant.lab.inflation import write_pair

_COMMON = {
    "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True,
    "vocab_size": 32128, "d_kv": 64, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "dropout_rate": 0.0,
    "tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0,
    "dtype": "bfloat16",
}  # fmt: skip


def _shape(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, Any]:
    own = {"d_model": hidden, "d_ff": intermediate, "num_layers": layers, "num_heads": heads}
    return {**_COMMON, **own, "num_decoder_layers": layers}


SHAPES = {
    "tiny": _shape(64, 128, 2, 2),
    "small": _shape(512, 1024, 8, 6),
    "base": _shape(768, 2048, 12, 12),
    "large": _shape(1024, 2816, 24, 16),
}
ACCEPTANCE = 0.75
TOKENS = 64  # of the greedy text, of which the draft model knows exactly this share


def made_pair(target: str, draft: str) -> tuple[Path, Path]:
    """Return the folders of target and draft model at these shapes; they are written if they are missing."""
    folder = cache_folder("t5") / f"{target}-{draft}-{ACCEPTANCE}-{TOKENS}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        write_pair(part, ACCEPTANCE, (SHAPES[target], SHAPES[draft]), first=TOKENS)
        part.rename(folder)
    return folder / "target", folder / "draft"
