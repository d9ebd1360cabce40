"""A decoder layer over all rows of a text at once, written out: of heads with the sizes of `tests.heads.LAYER`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tests.heads import LAYER


def normed(x: Tensor, scale: Tensor) -> Tensor:
    """Return x [n, d] divided by its root mean square and multiplied by scale [d]."""
    return functional.rms_norm(x, x.shape[-1:], scale, LAYER["rms_norm_eps"])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads [n, heads, dim] at positions [n]."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] / LAYER["rope_theta"] ** (torch.arange(half) / half))[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def layer(of: Mapping[str, Tensor], prefix: str, x: Tensor, hidden: Tensor, context: Tensor | None = None) -> Tensor:
    """Return rows [n, hidden] after the layer whose tensors have this prefix.

    context [c, hidden]: inputs of further keys and values, which come first. hidden [n, c + n]: the keys that a row
    does not see.
    """
    own = {name.removeprefix(prefix).removesuffix(".weight"): each for name, each in of.items()}
    y, dim = normed(x, own["input_layernorm"]), LAYER["head_dim"]
    read = y if context is None else torch.cat((context, y))
    queries = (y @ own["self_attn.q_proj"].T).view(len(y), -1, dim)
    keys, values = ((read @ own[f"self_attn.{name}_proj"].T).view(len(read), -1, dim) for name in "kv")
    if "self_attn.q_norm" in own:
        queries, keys = normed(queries, own["self_attn.q_norm"]), normed(keys, own["self_attn.k_norm"])
    places = torch.arange(len(read))
    queries, keys = rotated(queries, places[len(read) - len(y) :]), rotated(keys, places)
    keys, values = (each.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * dim**-0.5
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    x = x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ own["self_attn.o_proj"].T
    y = normed(x, own["post_attention_layernorm"])
    gate, up = (y @ own[f"mlp.{name}_proj"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ own["mlp.down_proj"].T
