"""Draft models with other ids for the target's tokens: small vocabularies, tables, and checkpoints in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file

from speculant.drafting import Drafter, DraftModelRunner, ModelDrafter, TreeTopology
from speculant.lab.exactness import History, Table, TableModel
from speculant.models import MappedVocabulary
from tests.models import ALPHABET, Shape, write_checkpoint


@dataclass(frozen=True)
class Words:
    """A target of `size` tokens and a draft of `rows`. pieces: the draft's ids of tokens that are not shared."""

    size: int
    rows: int
    shared: dict[int, int]
    pieces: dict[int, tuple[int, ...]]
    lead: tuple[int, ...] = ()
    begins: frozenset[int] = frozenset()

    @property
    def vocabulary(self) -> MappedVocabulary:
        """Its vocabulary."""
        own = tuple(sorted({*range(self.rows)} - {*self.shared.values()}))
        return MappedVocabulary(self.size, self.shared, own, self.pieces.__getitem__, self.lead, self.begins)

    def expected(self, tokens: Sequence[int]) -> History:
        """Return the draft's own tokens for a text, worked out independently."""
        found = [] if tokens[0] in self.begins else [*self.lead]
        for token in tokens:
            found += [self.shared[token]] if token in self.shared else self.pieces[token]
        return tuple(found)

    def probs(self, logits: Sequence[float]) -> list[float]:
        """Return a draft's distribution over the target's tokens; all 0 if it gives no shared token a probability."""
        weights = [math.exp(logits[self.shared[token]]) if token in self.shared else 0.0 for token in range(self.size)]
        total = sum(weights)
        return [weight / total if total else 0.0 for weight in weights]


WORDS = {
    "other ids": Words(3, 3, {0: 2, 1: 0, 2: 1}, {}),
    "some are shared": Words(3, 4, {0: 1, 2: 0}, {1: (2, 3, 0)}),
    "ids beyond the target's": Words(3, 6, {1: 5, 2: 4}, {0: (3, 0)}),
    "one is shared, after a mark": Words(3, 3, {2: 1}, {0: (0,), 1: (2, 2, 1)}, (0,), frozenset({0})),
    "a mark before every text": Words(3, 5, {0: 3, 1: 4}, {2: (1,)}, (2, 1)),
}


def table_of(words: Words, table: Table) -> TableModel:
    """Return a model with the ids of a vocabulary around a draft's table over its own ids."""
    vocabulary = words.vocabulary

    def logits(history: History) -> list[float]:
        own = table(tuple(vocabulary.draft_tokens(history)))
        return [
            own[words.shared[each]] if each in words.shared else -math.inf
            for each in range(words.size + len(vocabulary.own))
        ]

    return TableModel(logits, words.size + len(vocabulary.own))


def mapped_drafter(
    runner: DraftModelRunner,
    vocabulary: MappedVocabulary,
    topology: TreeTopology | None = None,
    kind: Callable[..., ModelDrafter] = ModelDrafter,
) -> Drafter:
    """Make the real drafter around a runner whose model has the ids of a vocabulary."""
    runner.vocabulary = vocabulary
    return kind(runner, vocabulary.size, topology=topology)


def in_order(folder: Path, order: Sequence[int], shape: Shape) -> str:
    """Write a checkpoint whose token `place` is the byte `order[place]`, with the usual one's rows for that byte."""
    path = write_checkpoint(
        folder, replace(shape, vocab_size=len(order) + 2, end=len(order)), [ALPHABET[byte] for byte in order]
    )
    usual = load_file(write_checkpoint(folder.parent / f"{folder.name}-usual", shape) + "/model.safetensors")
    rows = [*order, 256, 257]
    vocabulary = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {name: tensor[rows] if name in vocabulary else tensor for name, tensor in usual.items()}
    save_file(weights, f"{path}/model.safetensors")
    return path
