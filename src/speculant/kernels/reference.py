"""Plain PyTorch operations: the definition that every other backend is tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., d] to unit root mean square, in float32 or wider, then by weight [d]."""
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each row of x [..., d] to mean 0 and variance 1, then scale by weight [d] and add bias [d]."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d] by angles whose cos and sin are [T, 1, r]; dimensions from r on stay.

    Dimension i is paired with i + r/2, as in Hugging Face checkpoints.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), which is near x for small x and within +-cap; None = x."""
    return x if cap is None else cap * torch.tanh(x / cap)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [..., r, d] of queries [..., r, d] over keys and values [..., k, d].

    mask [r, k] is added to the scores; None = every key is visible. softcap limits the scores. sinks [..., r, 1] are
    scores without a value, which take part in the softmax.
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    scores = soft_cap(query @ keys.mT * scale, softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = _widened(scores).softmax(-1).to(query.dtype)
    return weights[..., : keys.shape[-2]] @ values


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
