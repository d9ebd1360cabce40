"""Plain PyTorch operations: the definition that every other backend is tested against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of x [..., d] to unit root mean square, in float32 or wider, then by weight [d]."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, d] by angles whose cos and sin are [T, 1, d].

    Dimension i is paired with i + d/2, as in Hugging Face checkpoints.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return functional.silu(gate) * up
