"""Training windows: sections of equal length of a shuffled stream of documents.

    stream      a a a a <end> b b b b b b b <end> c c c ...        documents, in another order in each epoch
    window      <end> | t0 t1 t2 ... t(n-1)                        input is everything but the last token
    targets             t0 t1 t2 ... t(n-1)

Each window begins with END_OF_TEXT, as every prompt does, and if possible at the start of a line. So
prompts have the form of the training text, even if they come from the middle of a file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SNAP = 64  # a window moves forward by fewer tokens than this to the start of a line


class Windows:
    """Windows by number. They are a pure function of the seed, so a position in the data is one integer."""

    def __init__(
        self,
        documents: Sequence[NDArray[np.int64]],
        begins_line: Sequence[NDArray[np.bool_]],
        length: int,
        end_of_text: int,
        seed: int,
    ) -> None:
        """Take tokens and line starts [n] of each document; every document ends with `end_of_text`."""
        self._documents, self._begins_line = documents, begins_line
        self._length, self._end, self._seed = length, end_of_text, seed
        self.per_epoch = sum(map(len, documents)) // length - 2
        self._epoch = -1
        self._stream: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._starts: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def batch(self, first: int, count: int) -> Tensor:
        """Return windows first .. first + count - 1, each END_OF_TEXT and `length` tokens: [count, 1 + length]."""
        return torch.from_numpy(np.stack([self._window(number) for number in range(first, first + count)]))

    def _window(self, number: int) -> NDArray[np.int64]:
        epoch, index = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        start = self._starts[index]
        return np.concatenate(([self._end], self._stream[start : start + self._length]))

    def _begin(self, epoch: int) -> None:
        generator = np.random.default_rng([self._seed, epoch])
        order = generator.permutation(len(self._documents))
        self._stream = np.concatenate([self._documents[i] for i in order])
        cuts = generator.integers(self._length) + self._length * generator.permutation(self.per_epoch)
        self._starts = _snap(cuts, np.concatenate([self._begins_line[i] for i in order]))
        self._epoch = epoch


def _snap(cuts: NDArray[np.int64], begins_line: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Move each cut [n] to the next line start if it is less than SNAP tokens away."""
    starts = np.flatnonzero(begins_line)
    following = starts[np.minimum(np.searchsorted(starts, cuts), len(starts) - 1)]
    near = (following >= cuts) & (following - cuts < SNAP)
    return np.where(near, following, cuts)


def held_out_windows(documents: Sequence[NDArray[np.int64]], length: int, end_of_text: int) -> list[Tensor]:
    """Cut each document from its start into windows of up to `length` tokens, END_OF_TEXT before each."""
    return [
        torch.from_numpy(np.concatenate(([end_of_text], document[first : first + length])))
        for document in documents
        for first in range(0, len(document), length)
    ]
