"""Constraints on the output, such as grammars: a mask over tokens for every node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from speculant.errors import RequestError
from speculant.tree import DraftTree

_BITS = 32  # of a mask's words


class Constraint(ABC):
    """Restricts one sequence's output, by tokens, not text; draft and target get the same masks."""

    @abstractmethod
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """Return which tokens may follow the drafted `tokens`, which follow the advanced ones; None = all.

        A mask is int32 [ceil(V / 32)]: bit v % 32 of word v // 32 allows token v, and tokens beyond its words are
        forbidden. Drafted tokens may be forbidden ones or come after the end; the mask then allows no token. The call
        must not change the constraint. It raises ConstraintError if the request has to end; another error ends it too,
        but the step is repeated for each sequence alone.
        """

    @abstractmethod
    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens; an end token may be the last one."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Undo the last `n` of all advanced tokens."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether only an end token may follow the advanced tokens: the request ends."""

    def forced(self) -> list[int]:
        """Return the tokens that must follow the advanced ones, as far as they are known; none if there is a choice."""
        return []

    def prepare(self, paths: Iterable[Sequence[int]]) -> None:  # noqa: B027 - constraints may compute masks when needed
        """Begin to compute the masks after drafted paths, which are needed next; the call returns at once."""


def forced_tokens(constraint: Constraint | None, vocab_size: int) -> list[int]:
    """Return the tokens that a constraint forces next, up to one outside of the vocabulary."""
    tokens = () if constraint is None else constraint.forced()
    return list(takewhile(lambda token: 0 <= token < vocab_size, tokens))


def prepare_masks(constraint: Constraint | None, tree: DraftTree) -> None:
    """Let a constraint prepare the masks after the root and all nodes of a tree."""
    if constraint is not None:
        constraint.prepare(tree.tokens_to(node) for node in range(-1, tree.size))


def checked_mask(constraint: Constraint, tokens: Sequence[int]) -> Tensor | None:
    """Return a copy of a constraint's mask, contiguous on the CPU; raises RequestError for an invalid one."""
    given: object = constraint.mask(tokens)
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.dtype != torch.int32 or given.dim() != 1:
        kind = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise RequestError(f"a constraint's mask is {kind}", "return a tensor of int32 [ceil(V / 32)], or None.")
    return given.cpu().clone(memory_format=torch.contiguous_format)  # a constraint may use its buffer again


def unpacked(mask: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens a mask allows, [vocab_size] bool."""
    bits = (mask[:, None] >> torch.arange(_BITS, dtype=torch.int32)) & 1
    allowed = bits.flatten()[:vocab_size].bool()
    return torch.nn.functional.pad(allowed, (0, vocab_size - len(allowed)))
