"""mT5: T5 1.1 with another vocabulary; its logits are never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.models.config import filled
from speculant.models.description import DecoderConfig
from speculant.models.families.t5 import describe, renamed

DEFAULTS = {
    "vocab_size": 250_112, "hidden_size": 512, "head_dim": 64, "d_ff": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6, "feed_forward_proj": "gated-gelu",
}  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read an mT5 config.json."""
    return describe(filled(hf, **renamed(hf, DEFAULTS)), scaled=False)
