"""The base of heads in training, and a kind's page."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from speculant.lab.training.config import HeadTrainingConfig
from speculant.lab.training.losses import Objective, OutputHead, distances, overlaps, weighted
from speculant.lab.training.texts import Texts
from speculant.models import Decoder

RANKS = 8
_AT_A_TIME = 8  # texts


@dataclass(frozen=True)
class HeadAcceptance:
    """Held-out figures by depth, the first drafted token first, on texts of the target.

    alpha: mean of sum min(p, q). rank_shares: of rows in which the target's likeliest token has each rank in q.
    """

    alpha: list[float]
    rank_shares: list[list[float]]
    rows: int


class HeadInTraining(Objective):
    """A head that is trained on a target's states, to predict `depth` tokens in a row.

    layers: whose states are inputs beside those after the final norm, numbered as in `TargetNeeds.hidden_layers`.
    """

    name = "distance to the target"
    layers: tuple[int, ...] = ()

    def __init__(self, module: nn.Module, target: Decoder, depth: int) -> None:
        self.module, self.depth = module, depth
        self._target, self._output = target, OutputHead.of(target).fixed()
        self._used: Texts | None = None

    def use(self, texts: Texts) -> None:
        """Use the states of these texts from now on."""
        self._used = texts

    @property
    def _texts(self) -> Texts:
        assert self._used is not None
        return self._used

    @override
    def loss(self, model: Any, windows: Tensor, progress: float) -> Tensor:
        return weighted(self._each_depth(*self.predicted(windows[:, 0]), progress))

    def acceptance(self, rows: Tensor) -> HeadAcceptance:
        """Measure texts, given by their places [b]."""
        alpha, shares, total = torch.zeros(self.depth), torch.zeros(self.depth, RANKS), 0
        with torch.inference_mode():
            for part in torch.split(rows, _AT_A_TIME):
                made, own = self.predicted(part)
                found = self._overlaps(made, own)
                alpha, shares, total = alpha + found[0].cpu(), shares + found[1].cpu(), total + made.shape[1]
        return HeadAcceptance((alpha / total).tolist(), (shares / total).tolist(), total)

    @abstractmethod
    def predicted(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's states by depth [depth, r, hidden], and the target's that they predict [r, hidden].

        Of rows of the texts at these places [b], each of which has a prediction at all depths.
        """

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the config.json of the folder, without figures."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the weights in the folder's format."""

    def _each_depth(self, made: Tensor, own: Tensor, progress: float) -> Tensor:
        """Return the loss at each depth [depth]."""
        return distances(made, own, self._output, progress, self._output_head())

    def _overlaps(self, made: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums by depth: see `overlaps`."""
        return overlaps(made, own, self._output, RANKS, self._output_head())

    def _output_head(self) -> OutputHead | None:
        """Return the head's own output head; None = the target's."""
        return None


@dataclass(frozen=True)
class HeadKind:
    """A kind of head. make: a new head for a target. own_output_head: whether it may have an output head of its own."""

    make: Callable[[HeadTrainingConfig, Decoder], HeadInTraining]
    own_output_head: bool = False
