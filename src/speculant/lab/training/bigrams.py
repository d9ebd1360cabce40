"""Counts of tokens and of pairs of tokens in text files, or in outputs of a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speculant.errors import ConfigError
from speculant.text.tokenizer import Tokenizer

BATCH = 2**22  # pairs that are counted at a time: 32 MB
_TOKENS = ".jsonl"


@dataclass(frozen=True)
class BigramCounts:
    """tokens [V]: counts of each. pairs [m], ascending: first * V + second of each pair; counts [m] of the pairs."""

    tokens: NDArray[np.int64]
    pairs: NDArray[np.int64]
    counts: NDArray[np.int64]


def read_sequences(files: Sequence[Path], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens of each file, without special tokens.

    A file named *.jsonl has token ids: each line is a list of them, or an object with `token_ids`, such as `speculant
    generate --json` prints. Any other file is UTF-8 text. Raises ConfigError for a file of another form.
    """
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read as text: {error}", "name UTF-8 text files.") from error
        if path.suffix == _TOKENS:
            yield from (
                _token_ids(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line
            )
        else:
            yield tokenizer.encode(text, add_special_tokens=False)


def _token_ids(line: str, where: str) -> list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}", "write one list of token ids a line.") from error
    ids = value.get("token_ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise ConfigError(f"{where} has no token ids", 'write [1, 2, 3] or {"token_ids": [1, 2, 3]}.')
    return ids


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
