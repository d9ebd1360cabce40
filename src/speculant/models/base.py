"""What a model is to the rest of the package: a flat batch in, hidden states and logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from speculant.cache.base import CacheShape, KVCache, Slots
from speculant.sampling.chance import Chance
from speculant.tree import ids
from speculant.types import DraftTree, Request


@dataclass(frozen=True)
class Segment:
    """One sequence's rows in a flat batch: `slots` says where they are stored.

    The last `tree.size` rows are draft nodes behind the root, the rest a chain of committed tokens.
    """

    slots: Slots
    tree: DraftTree

    @property
    def num_rows(self) -> int:
        """Rows of this sequence in the batch."""
        return len(self.slots.places)

    @property
    def num_committed(self) -> int:
        """Rows that are committed tokens (not draft nodes)."""
        return self.num_rows - self.tree.size


@dataclass(frozen=True)
class Batch:
    """Prompt chunks, last tokens and draft trees of many sequences, side by side.

    T is the number of rows over all segments. There is no padding and no batch dimension.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64; a draft node's position is its depth, not its row
    rows: Tensor  # [T] int64, storage rows in the cache
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SequenceInput:
    """What one sequence feeds in a pass: committed tokens its cache has not seen, then a draft tree."""

    seq_id: int
    tokens: Sequence[int]
    tree: DraftTree


@dataclass(eq=False)
class Chain:
    """One sequence's share of a draft: feed what its cache has not seen, then draw `limit` tokens (0 = none).

    All of them are fed but the last. probs [tokens, V] are those the tokens were drawn from, if a ratio rule may
    need them: a distribution that is not finite or sums to 0, because the model failed, then ends the chain.
    """

    request: Request
    feed: list[int]
    limit: int
    chance: Chance
    tokens: list[int] = field(default_factory=list)
    probs: Tensor | None = None

    @property
    def num_positions(self) -> int:
        """How many positions of the cache it needs."""
        return len(self.feed) + max(self.limit - 1, 0)


class CausalLM(Protocol):
    """A decoder whose cache is an argument."""

    @property
    def cache_shape(self) -> CacheShape:
        """What one position of this model's cache holds."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding rows included."""
        ...

    @property
    def max_positions(self) -> int:
        """The longest context the model was made for."""
        ...

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Return hidden states [T, hidden], writing the batch's keys and values to the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [r, vocab_size] of the given hidden rows [r, hidden]."""
        ...


def build_batch(feeds: Sequence[SequenceInput], cache: KVCache, device: torch.device) -> Batch:
    """Reserve cache rows for every feed and lay the sequences side by side (docs/references.md, verification pass)."""
    segments, tokens, positions, places = list[Segment](), list[int](), list[int](), list[int]()
    for feed in feeds:
        slots = cache.reserve(feed.seq_id, len(feed.tokens) + feed.tree.size)
        root = slots.start + len(feed.tokens) - 1
        segments.append(Segment(slots, feed.tree))
        tokens += [*feed.tokens, *feed.tree.token_list]
        positions += [*range(slots.start, root + 1), *(root + depth for depth in feed.tree.depths)]
        places += slots.places
    return Batch(
        ids(tokens).to(device),
        ids(positions).to(device),
        ids(places).to(device),
        tuple(segments),
    )


def known(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """Replace tokens beyond a model's own vocabulary by its first one: any guess is legal, no lookup is."""
    return [token if token < vocab_size else 0 for token in tokens]
