"""Descriptions of decoders whose layers differ in their windows alone, from plain settings."""

from __future__ import annotations

from typing import Any

from speculant.models import (
    Attention,
    DecoderConfig,
    DistanceBias,
    Embedding,
    Encoder,
    Experts,
    Head,
    Layer,
    Mlp,
    Norm,
    Rope,
    windowed,
)

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_positions": 2048, "windows": (None, None), "qk_norm": False, "qkv_bias": False, "output_bias": False,
    "mlp_bias": False, "tie_embeddings": False, "head_tokens": (), "experts": None,
}  # fmt: skip

SHARED = Experts(5, 2, 24, sigmoid=True, favours=True, factor=1.5, shared=Mlp(40), shared_gate=True)


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
    "max_positions": 2048, "embedding": {}, "norms_last": False,
}  # fmt: skip
BART: dict[str, Any] = {  # changes that make a model of BART's kind
    "bias": True, "norm": Norm(1e-5, "layer", bias=True), "scale": None, "activation": "gelu", "head_scale": 1.0,
    "buckets": 0, "embedding": {"positions": 1024, "norm": Norm(1e-5, "layer", bias=True)}, "norms_last": True,
}  # fmt: skip


def describe_pair(**changes: Any) -> DecoderConfig:
    """Describe an encoder and a decoder like T5's with the sizes of PAIR, except for the changes.

    buckets: 0 = no distances. embedding: fields of this part. norms_last: norms follow blocks, and logits have a
    bias.
    """
    given = {**PAIR, **changes}
    mlp = Mlp(given["intermediate_size"], given["bias"], given["gated"], given["activation"])

    def attention(**own: Any) -> Attention:
        sizes = given["num_heads"], given["num_kv_heads"], given["head_dim"], None
        return Attention(*sizes, scale=given["scale"], bias=given["bias"], output_bias=given["bias"], **own)

    def distances(index: int, both_ways: bool) -> DistanceBias | None:
        shares = None if given["own_distances"] or not index else 0
        found = (given["buckets"], given["max_distance"], both_ways, shares)
        return DistanceBias(*found) if given["buckets"] else None

    def layers(count: int, *, both_ways: bool, **own: Any) -> tuple[Layer, ...]:
        seen = [attention(ahead=both_ways, distances=distances(index, both_ways)) for index in range(count)]
        if not given["norms_last"]:
            crossed = {"before_cross": norm} if own else {}
            return tuple(Layer(each, mlp, norm, norm, **own, **crossed) for each in seen)
        ends = {"end_attention": norm, "end_cross": norm if own else None}
        last = [norm] * (count - 1) + [None]  # that of the last layer is the model's
        return tuple(
            Layer(each, mlp, None, None, **own, **ends, end_mlp=end) for each, end in zip(seen, last, strict=True)
        )

    norm = given["norm"]
    return DecoderConfig(
        embedding=Embedding(given["vocab_size"], given["hidden_size"], **given["embedding"]),
        layers=layers(given["layers"], both_ways=False, cross=attention(source=True)),
        norm=norm,
        head=Head(given["tied"], scale=given["head_scale"], bias=given["norms_last"]),
        max_positions=given["max_positions"],
        encoder=Encoder(layers(given["encoder_layers"], both_ways=True), norm),
    )
