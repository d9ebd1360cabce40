"""Descriptions of decoders whose layers differ in their windows alone, from plain settings."""

from __future__ import annotations

from typing import Any

from speculant.models.config import windowed
from speculant.models.description import (
    Attention,
    DecoderConfig,
    DistanceBias,
    Embedding,
    Encoder,
    Head,
    Layer,
    Mlp,
    Norm,
    Rope,
)

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


PAIR: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8,
    "layers": 2, "encoder_layers": 3, "buckets": 32, "max_distance": 128, "own_distances": False, "gated": False,
    "activation": "relu", "bias": False, "norm": Norm(1e-6), "scale": 1.0, "tied": True, "head_scale": 32**-0.5,
    "max_positions": 2048,
}  # fmt: skip


def describe_pair(**changes: Any) -> DecoderConfig:
    """Describe an encoder and a decoder like T5's with the sizes of PAIR, except for the changes."""
    given = {**PAIR, **changes}
    mlp = Mlp(given["intermediate_size"], given["bias"], given["gated"], given["activation"])

    def attention(**own: Any) -> Attention:
        sizes = given["num_heads"], given["num_kv_heads"], given["head_dim"], None
        return Attention(*sizes, scale=given["scale"], bias=given["bias"], output_bias=given["bias"], **own)

    def layers(count: int, *, both_ways: bool, **own: Any) -> tuple[Layer, ...]:
        shared = [None if given["own_distances"] or not index else 0 for index in range(count)]
        distances = [DistanceBias(given["buckets"], given["max_distance"], both_ways, each) for each in shared]
        norm = given["norm"]
        return tuple(Layer(attention(ahead=both_ways, distances=each), mlp, norm, norm, **own) for each in distances)

    cross = {"cross": attention(source=True), "before_cross": given["norm"]}
    return DecoderConfig(
        embedding=Embedding(given["vocab_size"], given["hidden_size"]),
        layers=layers(given["layers"], both_ways=False, **cross),
        norm=given["norm"],
        head=Head(given["tied"], scale=given["head_scale"]),
        max_positions=given["max_positions"],
        encoder=Encoder(layers(given["encoder_layers"], both_ways=True), given["norm"]),
    )
