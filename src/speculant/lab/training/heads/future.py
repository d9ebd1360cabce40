"""Training of heads on one state: head i learns the target's distribution i + 1 tokens later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.lab.training.heads.objective import HeadInTraining
from speculant.models import Decoder, FeedForwardHeads, ResidualHeads


class FutureObjective(HeadInTraining):
    """For each row s the heads predict from the states of rows s - 1, s - 2, ...

    extra: entries of config.json besides the sizes.
    """

    def __init__(self, heads: ResidualHeads | FeedForwardHeads, target: Decoder, extra: dict[str, Any]) -> None:
        super().__init__(heads, target, heads.shape.num_heads)
        self._heads, self._extra = heads, extra

    @override
    def config(self) -> dict[str, Any]:
        sizes = {"hidden_size": self._heads.shape.hidden_size, "vocab_size": self._target.vocab_size}
        return {**sizes, **self._extra}

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self._heads.tensors()

    @override
    def predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self._texts.states_of(places)
        count, length = self.depth, hidden.shape[1]
        made = self._heads.states(hidden.flatten(0, 1), count).view(count, *hidden.shape)
        first = max(count, self._texts.opening - 1)
        own = [made[head, :, first - 1 - head : length - 1 - head] for head in range(count)]
        return torch.stack(own).flatten(1, 2), hidden[:, first:].flatten(0, 1)
