"""The objective of a boosted draft: the target's distributions at the tokens that no earlier draft predicts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speculant.lab.training.heads.texts import Texts
from speculant.lab.training.objective import distribution_distance
from speculant.lab.training.output import OutputHead, chunks
from speculant.lab.training.passes import hidden_states
from speculant.models import Decoder


class MissedObjective:
    """The distance to the target at the tokens for which no draft of `before` has the target's likeliest token.

    This is SpecInfer's rule for a draft's data, token by token. known_share: the share of the other tokens that count
    too; `seed` and the step select them.
    """

    name = "distance to the target"

    def __init__(
        self, target: Decoder, texts: Texts, before: Sequence[Decoder], known_share: float = 0.0, seed: int = 0
    ) -> None:
        self._output, self._texts, self._before = OutputHead.of(target).fixed(), texts, before
        self._known_share, self._seed = known_share, seed

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`; windows are texts [b, 1 + n] with their places first (`Texts.batch`)."""
        tokens = windows[:, 1:]
        hidden = hidden_states(model, tokens)
        target_hidden = self._texts.states_of(windows[:, 0]).flatten(0, 1)
        rows = self._chosen(tokens, target_hidden, int(windows[0, 0]))
        if not len(rows):
            return hidden.sum() * 0.0
        return distribution_distance(hidden[rows], OutputHead.of(model), target_hidden[rows], self._output, progress)

    def _chosen(self, tokens: Tensor, target_hidden: Tensor, place: int) -> Tensor:
        """Return the rows [r] that are learned."""
        known = known_rows(self._before, tokens, likeliest(target_hidden, self._output)).any(0)
        generator = torch.Generator().manual_seed(self._seed + place)
        also = torch.rand(len(known), generator=generator) < self._known_share
        return (~known | also).nonzero()[:, 0]


@torch.no_grad()
def likeliest(hidden: Tensor, head: OutputHead) -> Tensor:
    """Return the likeliest tokens [r] by states [r, hidden] and an output head."""
    return torch.cat([head.logits(hidden[rows]).argmax(-1) for rows in chunks(len(hidden))])


@torch.no_grad()
def known_rows(drafts: Sequence[Decoder], tokens: Tensor, best: Tensor) -> Tensor:
    """Return for each draft whether it has the target's likeliest tokens `best` [r]: [drafts, r]."""
    found = [likeliest(hidden_states(draft, tokens), OutputHead.of(draft)) == best for draft in drafts]
    return torch.stack(found) if found else torch.zeros(1, len(best), dtype=torch.bool)


@torch.no_grad()
def overlap_and_ranks(
    draft: Tensor, target: Tensor, heads: tuple[OutputHead, OutputHead], ranks: int
) -> tuple[float, int]:
    """Compare the states [r, hidden] of a draft and of its target; heads: the output heads of both.

    Returns the sum over rows of sum min(p, q), and the number of rows whose likeliest token of the target is among the
    draft's `ranks` likeliest ones.
    """
    common, found = 0.0, 0
    for rows in chunks(len(draft)):
        q, p = heads[0].logits(draft[rows]).softmax(-1), heads[1].logits(target[rows]).softmax(-1)
        common += float(torch.minimum(p, q).sum())
        found += int((q.topk(ranks).indices == p.argmax(-1, keepdim=True)).sum())
    return common, found
