"""A form that begins after a model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.structured.constraint import WORD, Grammar, GrammarConstraint, with_tokens, without_tokens


@dataclass(frozen=True)
class Reasoning:
    """The tokens before and after the reasoning. opened: the prompt ends with the first one.

    If it does not, the first output token decides: it is the start token, or belongs to the form.
    """

    start: int
    end: int
    opened: bool = False


class ReasonedConstraint:
    """See `Constraint`. During the reasoning all tokens but end tokens are allowed; then the form begins."""

    def __init__(self, grammar: Grammar, reasoning: Reasoning) -> None:
        self._form: GrammarConstraint = grammar.constrain()
        self._reasoning = reasoning
        self._count = 0  # of all advanced tokens
        self._begins: int | None = None  # how many of them precede the form; None = unknown yet
        everything = torch.full((-(-grammar.vocab_size // WORD),), -1, dtype=torch.int32)
        self._free = without_tokens(everything, grammar.end_token_ids)

    def mask(self, tokens: Sequence[int]) -> Tensor:
        """See `Constraint.mask`."""
        before = self._before_form(tokens)
        if before is not None:
            return self._form.mask(tokens[before:])
        if tokens or self._reasons:
            return self._free
        return with_tokens(self._form.mask(()), [self._reasoning.start])

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        before = self._before_form(tokens)
        if before is not None:
            if len(tokens) > before:
                self._form.advance(tokens[before:])
            if self._begins is None:
                self._begins = self._count + before
        self._count += len(tokens)

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        kept = self._count - n
        if self._begins is not None:
            if undone := self._count - max(kept, self._begins):
                self._form.rollback(undone)
            if kept < self._begins or not kept:
                self._begins = None
        self._count = kept

    @property
    def is_done(self) -> bool:
        """See `Constraint.is_done`."""
        return self._begins is not None and self._form.is_done

    def forced(self) -> list[int]:
        """See `forced_tokens`."""
        return [] if self._begins is None else self._form.forced()

    def prepare(self, paths: Sequence[Sequence[int]]) -> None:
        """See `prepare_masks`."""
        if self._begins is not None:
            self._form.prepare(paths)

    @property
    def _reasons(self) -> bool:
        """Whether the advanced tokens end within the reasoning."""
        return self._begins is None and (self._reasoning.opened or self._count > 0)

    def _before_form(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens precede the form; None if it does not begin after them."""
        if self._begins is not None:
            return 0
        if not self._reasons and (not tokens or tokens[0] != self._reasoning.start):
            return 0 if tokens else None
        return tokens.index(self._reasoning.end) + 1 if self._reasoning.end in tokens else None
