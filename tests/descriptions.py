"""Descriptions of decoders whose layers differ in their windows alone, from plain settings."""

from __future__ import annotations

from typing import Any

from speculant.models.config import windowed
from speculant.models.description import Attention, DecoderConfig, Embedding, Head, Layer, Mlp, Norm, Rope

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_positions": 2048, "windows": (None, None), "qk_norm": False, "qkv_bias": False, "output_bias": False,
    "mlp_bias": False, "tie_embeddings": False, "head_tokens": (), "experts": None,
}  # fmt: skip


def describe(**changes: Any) -> DecoderConfig:
    """Describe a decoder with the sizes of SMALL, except for the changes."""
    given, norm = {**SMALL, **changes}, Norm(1e-6)
    attention = Attention(
        given["num_heads"], given["num_kv_heads"], given["head_dim"], Rope(10000.0),
        qk_norm=norm if given["qk_norm"] else None, bias=given["qkv_bias"], output_bias=given["output_bias"],
    )  # fmt: skip
    mlp = given["experts"] or Mlp(given["intermediate_size"], given["mlp_bias"])
    layer = Layer(attention, mlp, norm, norm)
    return DecoderConfig(
        embedding=Embedding(given["vocab_size"], given["hidden_size"]),
        layers=tuple(windowed(layer, given["windows"])),
        norm=norm,
        head=Head(given["tie_embeddings"], given["head_tokens"]),
        max_positions=given["max_positions"],
    )
