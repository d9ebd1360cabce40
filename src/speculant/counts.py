"""How often a sequence's tokens have occurred, updated token by token for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from speculant.tree import ids

_ROOM = 64  # output tokens to make room for at first


class TokenCounts:
    """The distinct tokens of prompt and output, and how often the output has each.

        tokens  | those of the prompt, in order of their ids | others, in the order of their first appearance |
        counts  | 0 or more                                  | 1 or more                                      |

    Adding or removing an output token takes constant time.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self._prompt = np.unique(np.asarray(prompt, dtype=np.int64))
        self._tokens = np.concatenate([self._prompt, np.empty(_ROOM, dtype=np.int64)])
        self._counts = np.zeros(len(self._tokens), dtype=np.int64)
        self._size = len(self._prompt)
        self._places: dict[int, int] = {}  # indices of the output's tokens
        self.num_tokens = len(prompt)  # of prompt and output
        self.add(output)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenCounts) or self.num_tokens != other.num_tokens:
            return False
        return torch.equal(self.tokens, other.tokens) and torch.equal(self.counts, other.counts)

    @property
    def tokens(self) -> Tensor:
        """The distinct tokens [k] in int64; valid until the counts change."""
        return torch.from_numpy(self._tokens[: self._size])

    @property
    def counts(self) -> Tensor:
        """How often the output has each of them, [k] in int64; valid until the counts change."""
        return torch.from_numpy(self._counts[: self._size])

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens that were appended to the output."""
        for token in tokens:
            place = self._find(token)
            self._places[token] = place = self._append(token) if place is None else place
            self._counts[place] += 1
        self.num_tokens += len(tokens)

    def remove(self, tokens: Sequence[int]) -> None:
        """Remove the output's last tokens, given in their order."""
        for token in reversed(tokens):
            place = self._places[token]
            self._counts[place] -= 1
            if not self._counts[place]:
                del self._places[token]
                self._size -= place >= len(self._prompt)  # no other token appeared later and is still there
        self.num_tokens -= len(tokens)

    def with_drafted(self, drafted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return tokens [k] and counts [k] with drafted tokens added to the output."""
        if not drafted:
            return self.tokens, self.counts
        counts, others = self.counts.clone(), dict[int, int]()
        for token in drafted:
            place = self._find(token)
            if place is None:
                others[token] = others.get(token, 0) + 1
            else:
                counts[place] += 1
        return torch.cat([self.tokens, ids(list(others))]), torch.cat([counts, ids(list(others.values()))])

    def _find(self, token: int) -> int | None:
        """Return a token's index; None if it has not appeared."""
        place = self._places.get(token)
        if place is None:
            index = int(np.searchsorted(self._prompt, token))
            place = index if index < len(self._prompt) and self._prompt[index] == token else None
        return place

    def _append(self, token: int) -> int:
        if self._size == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        place, self._size = self._size, self._size + 1
        self._tokens[place], self._counts[place] = token, 0
        return place
