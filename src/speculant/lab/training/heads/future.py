"""Training of heads on one state: head i learns the target's distribution i + 1 tokens later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speculant.lab.training.heads.base import HeadAcceptance
from speculant.lab.training.heads.distance import distances, overlaps, weighted
from speculant.lab.training.heads.texts import Texts
from speculant.lab.training.output import OutputHead
from speculant.models import Decoder, FeedForwardHeads, ResidualHeads

RANKS = 8
_AT_A_TIME = 8


class FutureObjective:
    """See `HeadInTraining`; for each row s the heads predict from the states of rows s - 1, s - 2, ..."""

    name = "distance to the target"
    layers: tuple[int, ...] = ()

    def __init__(self, heads: ResidualHeads | FeedForwardHeads, target: Decoder, extra: dict[str, Any]) -> None:
        self.module: nn.Module = heads
        self._heads, self._extra = heads, extra
        self._output = OutputHead.of(target).fixed()
        self._vocab_size = target.vocab_size
        self._texts: Texts | None = None

    def use(self, texts: Texts) -> None:
        """See `HeadInTraining.use`."""
        self._texts = texts

    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        """See `HeadInTraining.loss`."""
        states, target_states = self._predicted(windows[:, 0])
        return weighted(distances(states, target_states, self._output, progress))

    def acceptance(self, rows: Tensor) -> HeadAcceptance:
        """See `HeadInTraining.acceptance`."""
        count = self._heads.shape.num_heads
        alpha, shares, total = torch.zeros(count), torch.zeros(count, RANKS), 0
        with torch.inference_mode():
            for part in torch.split(rows, _AT_A_TIME):
                states, target_states = self._predicted(part)
                found = overlaps(states, target_states, self._output, RANKS)
                alpha, shares, total = alpha + found[0].cpu(), shares + found[1].cpu(), total + len(target_states)
        return HeadAcceptance((alpha / total).tolist(), (shares / total).tolist(), total)

    def config(self) -> dict[str, Any]:
        """See `HeadInTraining.config`."""
        return {"hidden_size": self._heads.shape.hidden_size, "vocab_size": self._vocab_size, **self._extra}

    def tensors(self) -> dict[str, Tensor]:
        """See `HeadInTraining.tensors`."""
        return self._heads.tensors()

    def _predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads' states [k, r, hidden] and the target's [r, hidden] for the rows that all heads predict."""
        assert self._texts is not None
        hidden = self._texts.states_of(places)
        count, length = self._heads.shape.num_heads, hidden.shape[1]
        made = self._heads.states(hidden.flatten(0, 1), count).view(count, *hidden.shape)
        first = max(count, self._texts.opening - 1)
        own = [made[head, :, first - 1 - head : length - 1 - head] for head in range(count)]
        return torch.stack(own).flatten(1, 2), hidden[:, first:].flatten(0, 1)
