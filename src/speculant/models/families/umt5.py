"""UMT5: mT5 with a table of distances in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculant.models.config import filled
from speculant.models.description import DecoderConfig
from speculant.models.families.mt5 import DEFAULTS
from speculant.models.families.t5 import GGUF as T5_GGUF, describe, renamed, scales

GGUF = replace(T5_GGUF, needs="dec.blk.1.attn_rel_b.weight")


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a UMT5 config.json. Its logits are scaled as those of T5 are; transformers 5.23 always scales them."""
    return describe(filled(hf, **renamed(hf, DEFAULTS)), scaled=scales(hf), own_distances=True)
