"""Keys and values in int8: each head of a position has a scale of its own.

    a head of a position    [ dim int8 | float32 scale ]        number i = scale * int8 i

The scale is max |x| / 127, and x / scale is rounded to the nearest integer, ties to even. A head of zeros has the
scale 0. A head with an infinity or NaN has the scale NaN, so that each result that depends on it is NaN too.

csrc/rows.h rounds in the same way, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculant.cache.base import SCALE_BYTES

ROUNDED = torch.int8
LARGEST = 127.0
LEAST = 1e-36  # a smaller max |x|, unless it is 0, counts as this: 127 / max |x| must not overflow


def round_heads(x: Tensor) -> Tensor:
    """Return heads [..., dim] of floats as int8 [..., dim + SCALE_BYTES]; the last bytes are the scale's."""
    wide = x.float()
    bound = wide.new_tensor(LARGEST)  # torch divides in two steps if one operand is a Python number
    largest = wide.abs().amax(-1, keepdim=True)
    finite, most = largest.isfinite(), largest.clamp_min(LEAST)
    numbers = torch.where(finite, (wide * (bound / most)).round(), 0.0).to(ROUNDED)
    scales = torch.where(largest == 0, 0.0, most / bound).masked_fill(~finite, torch.nan)
    return torch.cat((numbers, scales.view(ROUNDED)), dim=-1)


def read_heads(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., dim] of rounded heads [..., dim + SCALE_BYTES] in a type of floats."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = stored[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (stored[..., :-SCALE_BYTES].to(wide) * scales.to(wide)).to(dtype)
