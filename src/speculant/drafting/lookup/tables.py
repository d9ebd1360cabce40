"""Unigram and bigram tables: how likely each token is alone, and after each other token.

    P(v | t) = weight(t, v) + backoff(t) * unigram(v),    backoff(t) = 1 - sum of t's weights

Only the most frequent continuations of a token have a weight, so a file has at most `continuations` of them for each
token; all other tokens share the back-off, and every row sums to 1. Counts are smoothed by the method of Witten and
Bell (docs/references.md, bigram tables). With T(t) different tokens seen after t, it gives T(t) events to the tokens
that were not seen:

    weight(t, v) = count(t, v) / (count(t) + T(t)),    unigram(v) = (count(v) + T / V) / (N + T)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from speculant.errors import ConfigError, Converts

FORMAT = "speculant.bigrams.1"
TOLERANCE = 1e-4  # of a sum of probabilities in a file, which are float32
_FIX = "make the file again with `speculant train`; see docs/drafters.md."


@dataclass(frozen=True)
class BigramTables:
    """The contents of a file of tables. Token t's continuations are at offsets[t] to offsets[t + 1], by ascending id.

    Memory: 16 bytes per token and 12 per continuation, when it is used.
    """

    unigram: Tensor  # [V] float32, sums to 1
    offsets: Tensor  # [V + 1] int64
    tokens: Tensor  # [n] int32: the continuations of all tokens
    weights: Tensor  # [n] float32

    @classmethod
    def of_counts(
        cls, unigrams: NDArray[np.int64], pairs: NDArray[np.int64], counts: NDArray[np.int64], continuations: int
    ) -> BigramTables:
        """Smooth counts [V] of tokens, and counts [m] of pairs, which are first * V + second in ascending order.

        At most `continuations` of a token are kept: the most frequent ones, with the lowest ids on a tie.
        """
        vocab_size, num_seen = len(unigrams), int((unigrams > 0).sum())
        first = pairs // vocab_size
        sizes = np.bincount(first, minlength=vocab_size)
        events = np.bincount(first, weights=counts, minlength=vocab_size) + sizes
        ranks = np.empty_like(first)
        ranks[np.lexsort((-counts, first))] = np.arange(len(first)) - (np.cumsum(sizes) - sizes)[first]
        kept = ranks < continuations
        offsets = np.concatenate(([0], np.cumsum(np.bincount(first[kept], minlength=vocab_size))))
        unigram = (unigrams + num_seen / vocab_size) / (unigrams.sum() + num_seen)
        return cls(
            unigram=torch.from_numpy(unigram).float(),
            offsets=torch.from_numpy(offsets),
            tokens=torch.from_numpy((pairs[kept] % vocab_size).astype(np.int32)),
            weights=torch.from_numpy(counts[kept] / events[first[kept]]).float(),
        )

    @classmethod
    def load(cls, path: Path, vocab_size: int) -> BigramTables:
        """Read and check a file; raises ConfigError unless it has distributions over `vocab_size` tokens."""
        with Converts(ConfigError, f"{path} is not a readable file of tables", _FIX), safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("format") != FORMAT or set(file.keys()) != set(cls.__annotations__):
                raise ConfigError(f"{path} is not a file of tables ({FORMAT})", _FIX)
            tables = cls(**{name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - not a mapping
        for problem in tables.problems(vocab_size):
            raise ConfigError(f"{path} has {problem}", _FIX)
        return tables

    def save(self, path: Path) -> None:
        """Write a file; raises ConfigError if that is not possible."""
        tensors = {name: getattr(self, name).contiguous() for name in type(self).__annotations__}
        with Converts(ConfigError, f"{path} can't be written", "name another file."):
            save_file(tensors, path, metadata={"format": FORMAT})

    def problems(self, vocab_size: int) -> Iterator[str]:
        """Yield the tensors' problems, the most basic one first; later checks assume that earlier ones passed."""
        shapes = {
            "unigram": ([self.unigram.numel()], torch.float32),
            "offsets": ([self.unigram.numel() + 1], torch.int64),
            "tokens": ([self.weights.numel()], torch.int32),
            "weights": ([self.weights.numel()], torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            tensor: Tensor = getattr(self, name)
            if list(tensor.shape) != shape or tensor.dtype != dtype:
                yield f"{name} of shape {list(tensor.shape)} and type {tensor.dtype}, not {shape} and {dtype}"
        if len(self.unigram) != vocab_size:
            yield f"tables of {len(self.unigram)} tokens, and the target's vocabulary has {vocab_size}"
        steps = self.offsets.diff()
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.tokens) or bool((steps < 0).any()):
            yield "offsets that do not divide the continuations among the tokens"
        keys = self._rows * vocab_size + self.tokens
        if bool((self.tokens < 0).any()) or bool((self.tokens >= vocab_size).any()) or bool((keys.diff() <= 0).any()):
            yield "continuations that are not ascending token ids"
        if not _is_distribution(self.unigram) or not bool((self.weights >= 0).all() and (self._backoff >= 0).all()):
            yield "rows that are not distributions"

    def row(self, token: int) -> Tensor:
        """Return the distribution [V] in float64 after a token."""
        row = self._unigram * self._backoff[token]
        first, end = self.offsets[token : token + 2].tolist()
        row[self.tokens[first:end].long()] += self.weights[first:end]
        return row

    def probability(self, previous: int, token: int) -> float:
        """Return P(token | previous)."""
        first, end = self.offsets[previous : previous + 2].tolist()
        found = (self.tokens[first:end] == token).nonzero()
        weight = float(self.weights[first + int(found[0])]) if len(found) else 0.0
        return min(1.0, weight + float(self._backoff[previous] * self._unigram[token]))

    def log_probs(self, previous: Sequence[int]) -> Tensor:
        """Return log P(. | t) [r, V] in float32 for tokens t, on the device of the tables."""
        rows = self._log_unigram + self._log_backoff[list(previous)].unsqueeze(1)
        for row, token in zip(rows, previous, strict=True):
            first, end = self.offsets[token : token + 2].tolist()
            row[self.tokens[first:end].long()] = self._log_probs[first:end]
        return rows

    @cached_property
    def _rows(self) -> Tensor:
        """The token that each continuation [n] belongs to."""
        return torch.repeat_interleave(torch.arange(len(self.unigram), device=self.offsets.device), self.offsets.diff())

    @cached_property
    def _unigram(self) -> Tensor:
        return self.unigram.double() / self.unigram.double().sum()

    @cached_property
    def _backoff(self) -> Tensor:
        """1 minus the sum of each token's weights [V], in float64; a rounding error below 0 is 0."""
        left = 1 - torch.zeros_like(self._unigram).index_add_(0, self._rows, self.weights.double())
        return torch.where((left < 0) & (left > -TOLERANCE), 0.0, left)

    @cached_property
    def _log_unigram(self) -> Tensor:
        return self._unigram.log().float()

    @cached_property
    def _log_backoff(self) -> Tensor:
        return self._backoff.log().float()

    @cached_property
    def _log_probs(self) -> Tensor:
        """The log-probability of each continuation [n]."""
        shared = self._backoff[self._rows] * self._unigram[self.tokens.long()]
        return (shared + self.weights).log().float()

    def to(self, device: torch.device) -> BigramTables:
        """Return the tables on a device."""
        return BigramTables(*(getattr(self, name).to(device) for name in type(self).__annotations__))


def _is_distribution(probs: Tensor) -> bool:
    return bool((probs >= 0).all()) and abs(float(probs.double().sum()) - 1) <= TOLERANCE
