"""Experts in the reference: a router, and a feed-forward block for each expert, which computes the rows that use it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speculant.kernels import ACTIVATIONS
from speculant.models.description import Clamped, Experts


def gate_clamped(of: Clamped, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gated activation of two tensors of one shape; see `Clamped`."""
    gate = gate.clamp(max=of.limit)
    return (up.clamp(-of.limit, of.limit) + 1) * gate * torch.sigmoid(of.gain * gate)


class Expert(nn.Module):
    """One expert."""

    def __init__(self, of: Experts, hidden: int) -> None:
        super().__init__()
        self._of = of
        self.gate_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.up_proj = nn.Linear(hidden, of.size, bias=of.bias)
        self.down_proj = nn.Linear(of.size, hidden, bias=of.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        of = self._of
        gated = gate_clamped(of.clamped, gate, up) if of.clamped else ACTIVATIONS[of.activation](gate) * up
        out: Tensor = self.down_proj(gated)
        return out


class RoutedMlp(nn.Module):
    """The blocks of a layer with experts. One expert after the other computes its rows."""

    def __init__(self, of: Experts, hidden: int) -> None:
        super().__init__()
        self._of = of
        self.router = nn.Linear(hidden, of.count, bias=of.bias)
        self.experts = nn.ModuleList(Expert(of, hidden) for _ in range(of.count))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., hidden] to a result of the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        indices, weights = self.route(rows)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(indices == index)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return out.view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the experts that rows x [r, hidden] use, and their weights, both [r, used].

        The sort is stable, so the lowest index wins among equal scores.
        """
        scores = self.router(x).to(torch.promote_types(x.dtype, torch.float32))
        ordered, indices = scores.sort(dim=-1, descending=True, stable=True)
        chosen, used = ordered[:, : self._of.used], indices[:, : self._of.used]
        weights = (chosen - (chosen if self._of.renormalise else scores).logsumexp(-1, keepdim=True)).exp()
        return used, weights.to(x.dtype)
