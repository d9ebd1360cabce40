"""Marian, the translators of OPUS-MT: BART with sinusoids as positions, and embeddings without a norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculant.errors import ModelError
from speculant.models.config import count, filled, flag
from speculant.models.description import DecoderConfig
from speculant.models.families.bart import describe


def read_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a Marian config.json."""
    hf = filled(hf, vocab_size=58_101)
    size = count(hf, "vocab_size")
    if not flag(hf, "share_encoder_decoder_embeddings", True) or count(hf, "decoder_vocab_size", size) != size:
        raise ModelError(
            "config.json describes an encoder and a decoder with different vocabularies, which is not implemented",
            "use a checkpoint with share_encoder_decoder_embeddings = true.",
        )
    return describe(hf, embedding={}, sinusoids=True)
