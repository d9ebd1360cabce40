"""Words that an output must not contain, and the only tokens that it may have; beside a form if there is one."""

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
    """The rules of a request, for any number of sequences: banned words, as token ids, and allowed tokens; None = all.

    The last token of a word is banned where the output ends with the others, drafted ones included. So a word of one
    token is never there.
    """

    def __init__(self, vocab_size: int, words: Sequence[Word], allowed: Collection[int] | None) -> None:
        single = [word[0] for word in words if len(word) == 1]
        self._usual = without_tokens(_mask_of(vocab_size, allowed), single)
        self._free = allowed is None and not single
        self._by_token: dict[int, list[Word]] = {}  # the longer words, by the last token but one
        for word in words:
            if len(word) > 1:
                self._by_token.setdefault(word[-2], []).append(word)
        self.reach = max((len(word) - 1 for word in words), default=0)

    def constrain(self) -> VocabularyConstraint:
        """Return the constraint of one sequence."""
        return VocabularyConstraint(self)

    def mask_after(self, output: Sequence[int]) -> Tensor | None:
        """Return the mask after an output, of which the last `reach` tokens are enough; None = all may follow."""
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
    """See `Constraint`; it never ends a text."""

    is_done = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._taken: list[int] = []

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        reach = self._vocabulary.reach
        return self._vocabulary.mask_after([*self._taken[max(0, len(self._taken) - reach) :], *tokens])

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        self._taken += tokens

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        del self._taken[len(self._taken) - n :]


class JoinedConstraint:
    """See `Constraint`: the form of an output and its vocabulary together. Tokens that both allow may come."""

    def __init__(self, form: Constraint, vocabulary: Constraint) -> None:
        self._form, self._vocabulary = form, vocabulary

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        masks = [each.mask(tokens) for each in (self._form, self._vocabulary)]
        return reduce(_both, masks)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`. The form is first: it may refuse tokens, and then nothing has changed."""
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
        """See `forced_tokens`. What the form forces is a draft, so that a banned token among it is rejected."""
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
    """Return what makes the constraint of a sequence that has a form, a vocabulary, both or neither."""
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
    """Return the tokens that two masks allow; tokens beyond the end of the shorter mask are forbidden."""
    if one is None or other is None:
        return other if one is None else one
    size = min(len(one), len(other))
    return one[:size] & other[:size]


Encode = Callable[[str, bool], list[int]]  # text, and whether special tokens are added


def banned_tokens(words: Sequence[str | Word], encode: Encode) -> tuple[Word, ...]:
    """Return banned words as token ids. Raises RequestError for a text of which the tokenizer makes none."""
    found: list[Word] = []
    for word in words:
        tokens = _tokens_of(word, encode) if isinstance(word, str) else [word]
        if not tokens:
            raise RequestError(f"bad_words has {word!r}, of which the tokenizer makes no tokens", "leave it out.")
        found += tokens
    return tuple(found)


def _tokens_of(word: str, encode: Encode) -> list[list[int]]:
    """Return the token ids of a banned text: alone, and after a space if that gives other ids of the same number.

    That is vLLM's rule.
    """
    alone, behind = (encode(space + word.lstrip(), False) for space in ("", " "))
    if not alone:
        return []
    other = len(behind) == len(alone) and behind[0] != alone[0]
    return [alone, behind] if other else [alone]
