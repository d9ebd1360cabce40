"""Positions that are not learned (Attention Is All You Need, arXiv 1706.03762, 3.5), in the order of Marian."""

from __future__ import annotations

import torch
from torch import Tensor


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return the vectors float32 [n, width] of positions [n]: the sines of all frequencies, then the cosines."""
    places = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angles = positions[:, None] / 10_000 ** (places / width)
    return torch.cat((angles.sin(), angles[:, : width // 2].cos()), dim=1).float()
