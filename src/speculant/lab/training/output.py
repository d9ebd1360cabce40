"""Output heads in training: logits of a few rows at a time, and the way of gradients back through them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.errors import ModelError
from speculant.kernels import soft_cap
from speculant.models import Decoder

_ROWS = 256  # distributions computed at a time


@dataclass(frozen=True, eq=False)
class OutputHead:
    """Logits of states [r, hidden]: capped(scale * states @ matrix.T), where a soft cap c limits l to c * tanh(l / c).

    matrix [n, hidden]; tokens [n]: the ids of its rows, None = all, in order. softcap: None = no limit.
    """

    matrix: Tensor
    tokens: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Decoder, size: int | None = None) -> OutputHead:
        """Return the output head of a model, of its first `size` tokens; None = all.

        Raises ModelError for a model whose logits have a bias.
        """
        head = model.config.head
        if head.bias:
            raise ModelError(
                "training is not implemented for models with a bias of logits", "use a model without final_logits_bias."
            )
        tokens = torch.tensor(head.tokens) if head.tokens else None
        return cls(model.lm_head.weight[:size], tokens, head.scale, head.softcap)

    def fixed(self) -> OutputHead:
        """Return the same head without gradients."""
        return OutputHead(self.matrix.detach(), self.tokens, self.scale, self.softcap)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the rows [n, hidden] of these ids, by which states are multiplied, without a soft cap."""
        return self.matrix[tokens] * self.scale

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [r, n]."""
        products = states @ self.matrix.T
        return soft_cap(products if self.scale == 1 else products * self.scale, self.softcap)

    def of_products(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient for the logits [r, n] into that for states @ matrix.T, in place."""
        if self.softcap is not None:
            gradient.mul_(1 - (logits / self.softcap).square_())
        return gradient if self.scale == 1 else gradient.mul_(self.scale)


def chunks(rows: int) -> Iterator[slice]:
    """Yield slices of `rows` rows. The distributions of one slice fit into memory together."""
    return (slice(first, first + _ROWS) for first in range(0, rows, _ROWS))
