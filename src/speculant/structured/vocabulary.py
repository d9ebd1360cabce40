"""Banned words and allowed tokens as a constraint, alone or together with a form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from speculant.constraints import Constraint
from speculant.errors import RequestError
from speculant.structured.constraint import WORD, without_tokens
from speculant.text import Beginning, beginnings_of

Word = Sequence[int]
MASKS = 32  # kept per request, so that samples with the same words in sight share one


class Vocabulary:
    """The banned words of a request, as token ids, and its allowed tokens (None = all), for any number of sequences.

    The last token of a word is banned where the output, drafted tokens included, ends with the word's other tokens. A
    word of one token is always banned. An output moves through an automaton of the words' beginnings, so a token takes
    the same time however many words there are.
    """

    def __init__(self, vocab_size: int, words: Sequence[Word], allowed: Collection[int] | None) -> None:
        self._allowed, self._is_free = _mask_of(vocab_size, allowed), allowed is None
        self.reach = max((len(word) - 1 for word in words), default=0)
        self.root: Beginning[int] = beginnings_of(word[:-1] for word in words)
        self._last = np.array([word[-1] for word in words], dtype=np.int64)
        self._masks = lru_cache(MASKS)(self._mask_at)

    def constrain(self) -> VocabularyConstraint:
        """Return the constraint of one sequence."""
        return VocabularyConstraint(self)

    def mask_after(self, output: Sequence[int]) -> Tensor | None:
        """Return the mask after an output, which depends on its last `reach` tokens; None = all are allowed."""
        return self.mask_at(reduce(Beginning.after, output, self.root))

    def mask_at(self, node: Beginning[int]) -> Tensor | None:
        """Return the mask at a node of the automaton; None = all tokens are allowed."""
        return self._masks(node) if node.ends or not self._is_free else None

    def _mask_at(self, node: Beginning[int]) -> Tensor:
        return without_tokens(self._allowed, self._last[[*node.ends]]) if node.ends else self._allowed


class VocabularyConstraint(Constraint):
    """The constraint of a vocabulary, which never ends a text."""

    is_done = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._nodes = [vocabulary.root]  # after each advanced token

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        return self._vocabulary.mask_at(reduce(Beginning.after, tokens, self._nodes[-1]))

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._nodes.append(self._nodes[-1].after(token))

    @override
    def rollback(self, n: int) -> None:
        del self._nodes[len(self._nodes) - n :]


class JoinedConstraint(Constraint):
    """The form of an output together with its vocabulary. A token must be allowed by both."""

    def __init__(self, form: Constraint, vocabulary: Constraint) -> None:
        self._form, self._vocabulary = form, vocabulary

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        masks = [each.mask(tokens) for each in (self._form, self._vocabulary)]
        return reduce(_both, masks)

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """The form comes first: if it refuses the tokens, nothing has changed."""
        self._form.advance(tokens)
        self._vocabulary.advance(tokens)

    @override
    def rollback(self, n: int) -> None:
        self._vocabulary.rollback(n)
        self._form.rollback(n)

    @property
    @override
    def is_done(self) -> bool:
        return self._form.is_done

    @override
    def forced(self) -> list[int]:
        """The form's forced tokens, which are a draft: a banned one among them is rejected."""
        return self._form.forced()

    @override
    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
        self._form.prepare(paths)


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
