"""Matrices of e4m3 numbers with a scale for each 128 inputs of an output, by their definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
LARGEST = 448.0


def encode(weight: Tensor) -> Tensor:
    """Return rows, uint8 [n, bytes], that stand for about these weights [n, k]: scales, each before its numbers."""
    blocks = functional.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).view(len(weight), -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / LARGEST
    numbers = (blocks / scales.clamp_min(1e-30)).to(torch.float8_e4m3fn)
    return join(numbers.flatten(1)[:, : weight.shape[1]], scales[..., 0])


def join(numbers: Tensor, scales: Tensor) -> Tensor:
    """Return rows of numbers [n, k] in float8_e4m3fn and scales [n, blocks] in float32."""
    padded = functional.pad(numbers.view(torch.uint8), (0, -numbers.shape[1] % BLOCK)).view(len(numbers), -1, BLOCK)
    rows = torch.cat((scales[..., None].contiguous().view(torch.uint8), padded), dim=2).flatten(1)
    return rows[:, : numbers.shape[1] + 4 * scales.shape[1]].contiguous()


def decode(rows: Tensor, k: int) -> Tensor:
    """Return the weights [n, k] in float32 that rows stand for."""
    blocks = functional.pad(rows, (0, -rows.shape[1] % (BLOCK + 4))).view(len(rows), -1, BLOCK + 4)
    scales = blocks[..., :4].contiguous().view(torch.float32)
    numbers = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn).float()
    return (scales * numbers).flatten(1)[:, :k]
