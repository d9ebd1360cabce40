"""The objective of an encoder-decoder model, and its figures on held-out pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from speculant.lab.training.evaluation import Overlap, Watcher
from speculant.lab.training.objective import distribution_distance, text_loss
from speculant.lab.training.output import OutputHead, chunks
from speculant.lab.training.passes import decoded_states, encoded_sources
from speculant.lab.training.seq2seq.pairs import PairBatch, Pairs
from speculant.models import Decoder

_AT_A_TIME = 32  # pairs in a pass


class PairObjective:
    """Cross-entropy of the targets, or with a teacher the distance to its distributions at their tokens."""

    def __init__(self, pairs: Pairs, teacher: Decoder | None = None) -> None:
        self._pairs, self._teacher = pairs, teacher
        self.name = "cross-entropy" if teacher is None else "distance to the teacher"

    def loss(self, model: Decoder, windows: Tensor, progress: float) -> Tensor:
        """See `Objective.loss`; the first column of `windows` has the places of pairs."""
        batch = self._pairs.tensors(windows[:, 0].tolist(), model.lm_head.weight.device)
        hidden, head = states_of_pairs(model, batch), OutputHead.of(model)
        if self._teacher is None:
            return text_loss(hidden, head, batch.tokens)
        with torch.no_grad():
            target_hidden = states_of_pairs(self._teacher, batch)
        return distribution_distance(hidden, head, target_hidden, OutputHead.of(self._teacher), progress)


def states_of_pairs(model: Decoder, batch: PairBatch) -> Tensor:
    """Return the states [r, hidden] from which the tokens [r] of a batch are predicted."""
    encoded = encoded_sources(model, batch.sources, batch.lengths)
    return decoded_states(model, batch.inputs, encoded, batch.lengths)[batch.real]


@torch.inference_mode()
def loss_of_pairs(model: Decoder, pairs: Pairs, watch: Watcher | None = None, most: int | None = None) -> float:
    """Return the mean cross-entropy, in nats per token, of the targets; most: of this many pairs, None = all."""
    total, count, head = 0.0, 0, OutputHead.of(model)
    groups = pairs.places(_AT_A_TIME)
    for done, places in enumerate(groups[:: 1 if most is None else max(1, len(pairs) // most)], start=1):
        batch = pairs.tensors(places, model.lm_head.weight.device)
        hidden = states_of_pairs(model, batch)
        for rows in chunks(len(hidden)):
            total += float(functional.cross_entropy(head.logits(hidden[rows]), batch.tokens[rows], reduction="sum"))
        count += len(hidden)
        if watch:
            watch(done / len(groups))
    return total / count


@torch.inference_mode()
def overlap_of_pairs(target: Decoder, draft: Decoder, pairs: Pairs) -> Overlap:
    """Compare two models' distributions at each token of the targets."""
    common, agreed, count, heads = 0.0, 0, 0, [OutputHead.of(model) for model in (target, draft)]
    for places in pairs.places(_AT_A_TIME):
        batch = pairs.tensors(places, draft.lm_head.weight.device)
        states = [states_of_pairs(model, batch) for model in (target, draft)]
        for rows in chunks(len(batch.tokens)):
            p, q = (head.logits(own[rows]).softmax(-1) for head, own in zip(heads, states, strict=True))
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            common += float(torch.minimum(p, q).sum())
        count += len(batch.tokens)
    return Overlap(common / count, agreed / count, count)
