"""A training pass through the shipping decoder: no state, no rollback, gradients flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from speculant.cache.base import KVCache, Slots
from speculant.models.base import Batch, Segment
from speculant.models.decoder import Decoder
from speculant.types import DraftTree


class PassCache:
    """What a decoder asks of a cache within one pass: the keys and values just written, nothing older."""

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._spans = list(zip(ends[:-1], ends[1:], strict=True))  # a sequence's rows in the flat batch
        self._keys = self._values = torch.empty(0)

    def slots(self, seq: int) -> Slots:
        """Say where a sequence's rows are."""
        return Slots(seq, 0, torch.arange(*self._spans[seq]))

    def write(self, layer: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [T, kv_heads, head_dim] for the reads that follow."""
        self._keys, self._values = keys, values

    def read(self, layer: int, seq: int) -> tuple[Tensor, Tensor]:
        """Return one sequence's rows of what was written last."""
        first, end = self._spans[seq]
        return self._keys[first:end], self._values[first:end]


def hidden_states(model: Decoder, sequences: Sequence[Tensor]) -> Tensor:
    """Run token sequences [n_i], each from position 0, through the model: [sum of n_i, hidden]."""
    lengths = [len(sequence) for sequence in sequences]
    cache = PassCache(lengths)
    tokens = torch.cat(list(sequences))
    positions = torch.cat([torch.arange(length) for length in lengths])
    segments = tuple(Segment(cache.slots(seq), DraftTree.empty()) for seq in range(len(lengths)))
    batch = Batch(tokens, positions, torch.arange(len(tokens)), segments)
    return model.forward(batch, cast(KVCache, cache))
