"""Banned words and allowed tokens as a constraint, alone or together with a form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from speculant.constraints import Constraint, ForcingConstraint, PreparingConstraint
from speculant.errors import RequestError
from speculant.structured.constraint import WORD, without_tokens

Word = Sequence[int]


class Vocabulary:
    """The banned words of a request, as token ids, and its allowed tokens (None = all), for any number of sequences.

    The last token of a word is banned where the output, drafted tokens included, ends with the word's other tokens. A
    word of one token is always banned.
    """

    def __init__(self, vocab_size: int, words: Sequence[Word], allowed: Collection[int] | None) -> None:
        single = [word[0] for word in words if len(word) == 1]
        self._usual = without_tokens(_mask_of(vocab_size, allowed), single)
        self._free = allowed is None and not single
        self._by_token: dict[int, list[Word]] = {}  # words of two or more tokens, by their last token but one
        for word in words:
            if len(word) > 1:
                self._by_token.setdefault(word[-2], []).append(word)
        self.reach = max((len(word) - 1 for word in words), default=0)

    def constrain(self) -> VocabularyConstraint:
        """Return the constraint of one sequence."""
        return VocabularyConstraint(self)

    def mask_after(self, output: Sequence[int]) -> Tensor | None:
        """Return the mask after an output, which depends on its last `reach` tokens; None = all are allowed."""
        banned = list(self._completing(output))
        if banned:
            return without_tokens(self._usual, banned)
        return None if self._free else self._usual

    def _completing(self, output: Sequence[int]) -> Iterator[int]:
        """Yield the tokens that would complete a word."""
        for word in self._by_token.get(output[-1], ()) if output else ():
            if tuple(output[1 - len(word) :]) == tuple(word[:-1]):
                yield word[-1]


class VocabularyConstraint:
    """See `Constraint`. It never ends a text."""

    is_done = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._advanced: list[int] = []

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        reach = self._vocabulary.reach
        return self._vocabulary.mask_after([*self._advanced[max(0, len(self._advanced) - reach) :], *tokens])

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        self._advanced += tokens

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        del self._advanced[len(self._advanced) - n :]


class JoinedConstraint:
    """See `Constraint`: the form of an output together with its vocabulary. A token must be allowed by both."""

    def __init__(self, form: Constraint, vocabulary: Constraint) -> None:
        self._form, self._vocabulary = form, vocabulary

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        masks = [each.mask(tokens) for each in (self._form, self._vocabulary)]
        return reduce(_both, masks)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`. The form comes first: if it refuses the tokens, nothing has changed."""
        self._form.advance(tokens)
        self._vocabulary.advance(tokens)

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        self._vocabulary.rollback(n)
        self._form.rollback(n)

    @property
    def is_done(self) -> bool:
        """See `Constraint.is_done`."""
        return self._form.is_done

    def forced(self) -> list[int]:
        """See `forced_tokens`. The form's forced tokens are a draft, so a banned one among them is rejected."""
        form: ForcingConstraint | Constraint = self._form
        return form.forced() if hasattr(form, "forced") else []

    def prepare(self, paths: Sequence[Sequence[int]]) -> None:
        """See `prepare_masks`."""
        form: PreparingConstraint | Constraint = self._form
        if hasattr(form, "prepare"):
            form.prepare(paths)


def constrain_all(
    form: Callable[[], Constraint] | None, vocabulary: Vocabulary | None
) -> Callable[[], Constraint] | None:
    """Return a function that makes the constraint of a form, a vocabulary or both; None for neither."""
    if vocabulary is None or form is None:
        return form if vocabulary is None else vocabulary.constrain
    return lambda: JoinedConstraint(form(), vocabulary.constrain())


def _mask_of(vocab_size: int, allowed: Collection[int] | None) -> Tensor:
    """Return the mask that allows some tokens; None = all."""
    flags = np.full(-(-vocab_size // WORD) * WORD, allowed is None)
    if allowed is not None:
        flags[list(allowed)] = True
    return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the mask of tokens that two masks allow. Tokens beyond the end of the shorter mask are forbidden."""
    if one is None or other is None:
        return other if one is None else one
    size = min(len(one), len(other))
    return one[:size] & other[:size]


Encode = Callable[[str, bool], list[int]]  # text, and whether special tokens are added


def banned_tokens(words: Sequence[str | Word], encode: Encode) -> tuple[Word, ...]:
    """Return banned words as token ids. Raises RequestError for a text that the tokenizer encodes as no tokens."""
    found: list[Word] = []
    for word in words:
        tokens = _tokens_of(word, encode) if isinstance(word, str) else [word]
        if not tokens:
            raise RequestError(f"bad_words has {word!r}, which the tokenizer encodes as no tokens", "leave it out.")
        found += tokens
    return tuple(found)


def _tokens_of(word: str, encode: Encode) -> list[list[int]]:
    """Return the token ids of a banned text, without and with a leading space.

    As in vLLM, the second is left out if it has another number of tokens, or the same first token.
    """
    alone, spaced = (encode(space + word.lstrip(), False) for space in ("", " "))
    if not alone:
        return []
    other = len(spaced) == len(alone) and spaced[0] != alone[0]
    return [alone, spaced] if other else [alone]
