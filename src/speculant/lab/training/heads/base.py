"""The protocol of a head in training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from speculant.lab.training.heads.texts import Texts


@dataclass(frozen=True)
class HeadAcceptance:
    """Held-out figures by depth, the first drafted token first, on texts of the target.

    alpha: mean of sum min(p, q). rank_shares: of rows in which the target's likeliest token has each rank in q.
    """

    alpha: list[float]
    rank_shares: list[list[float]]
    rows: int


class HeadInTraining(Protocol):
    """A head that is trained on a target's states. It is an `Objective` for its own module.

    layers: whose states are inputs beside those after the final norm, numbered as in `DrafterNeeds.hidden_layers`.
    """

    name: str
    layers: tuple[int, ...]
    module: nn.Module

    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        """Return the loss of texts [b, 1 + n]: see `Texts.batch`."""
        ...

    def use(self, texts: Texts) -> None:
        """Use the states of these texts from now on."""
        ...

    def acceptance(self, rows: Tensor) -> HeadAcceptance:
        """Measure texts, given by their places [b]."""
        ...

    def config(self) -> dict[str, Any]:
        """Return the config.json of the folder, without figures."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in the folder's format."""
        ...
