"""Counts of tokens and of pairs of tokens in sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from speculant.errors import ConfigError

BATCH = 2**22  # pairs that are counted at a time: 32 MB


@dataclass(frozen=True)
class BigramCounts:
    """tokens [V]: counts of each. pairs [m], ascending: first * V + second of each pair; counts [m] of the pairs."""

    tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]
    counts: NDArray[np.int64]


def count_bigrams(sequences: Iterable[Sequence[int]], vocab_size: int) -> BigramCounts:
    """Count tokens and neighbours; raises ConfigError for a token beyond the vocabulary, or if there is no pair."""
    tokens = np.zeros(vocab_size, dtype=np.int64)
    pairs = counts = np.zeros(0, dtype=np.int64)
    pending, num_pending = list[NDArray[np.int64]](), 0
    for sequence in sequences:
        own = _checked(sequence, vocab_size)
        tokens += np.bincount(own, minlength=vocab_size)
        pending.append(own[:-1] * vocab_size + own[1:])
        num_pending += len(pending[-1])
        if num_pending >= BATCH:
            pairs, counts = _add(pairs, counts, np.concatenate(pending))
            pending, num_pending = [], 0
    pairs, counts = _add(pairs, counts, np.concatenate([*pending, pairs[:0]]))
    if not len(pairs):
        raise ConfigError("the files hold no two tokens in a row", "name files with text.")
    return BigramCounts(tokens, pairs, counts)


def count_tokens(sequences: Iterable[Sequence[int]], vocab_size: int) -> NDArray[np.int64]:
    """Return the count of each token [V]; raises ConfigError for a token beyond the vocabulary."""
    tokens = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        tokens += np.bincount(_checked(sequence, vocab_size), minlength=vocab_size)
    return tokens


def _checked(sequence: Sequence[int], vocab_size: int) -> NDArray[np.int64]:
    if len(sequence) and not 0 <= min(sequence) <= max(sequence) < vocab_size:
        raise ConfigError(
            f"the files have the token {max(sequence)} and the vocabulary has {vocab_size}",
            "name the model of these tokens.",
        )
    return np.array(sequence, dtype=np.int64)


def _add(
    pairs: NDArray[np.int64], counts: NDArray[np.int64], more: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count more pairs."""
    found, inverse = np.unique(np.concatenate((pairs, more)), return_inverse=True)
    weights = np.concatenate((counts, np.ones(len(more), dtype=np.int64)))
    return found, np.bincount(inverse, weights=weights, minlength=len(found)).astype(np.int64)
