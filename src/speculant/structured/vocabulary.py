"""Banned words and allowed tokens as a constraint, alone or together with a form."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from speculant.constraints import Constraint
from speculant.errors import RequestError
from speculant.structured.constraint import WORD, without_tokens

Word = Sequence[int]
MASKS = 32  # kept per request, so that samples with the same words in sight share one


class _Node:
    """A beginning of banned words. shorter: the longest other beginning that it ends with (Aho and Corasick 1975).

    own: the tokens that complete a word here; banned: those that complete one here or after a shorter beginning.
    """

    __slots__ = ("banned", "longer", "own", "shorter")

    def __init__(self) -> None:
        self.longer: dict[int, _Node] = {}
        self.shorter: _Node | None = None
        self.own: list[int] = []
        self.banned: NDArray[np.int64] | None = None

    def after(self, token: int) -> _Node:
        """Return the node of the longest beginning that a text ends with, one token later."""
        node = self
        while token not in node.longer:
            if node.shorter is None:
                return node
            node = node.shorter
        return node.longer[token]


class Vocabulary:
    """The banned words of a request, as token ids, and its allowed tokens (None = all), for any number of sequences.

    The last token of a word is banned where the output, drafted tokens included, ends with the word's other tokens. A
    word of one token is always banned. An output moves through an automaton of the words' beginnings, so a token takes
    the same time however many words there are.
    """

    def __init__(self, vocab_size: int, words: Sequence[Word], allowed: Collection[int] | None) -> None:
        self._allowed, self._is_free = _mask_of(vocab_size, allowed), allowed is None
        self.reach = max((len(word) - 1 for word in words), default=0)
        self.root = _Node()
        for word in words:
            node = self.root
            for token in word[:-1]:
                node = node.longer.setdefault(token, _Node())
            node.own.append(word[-1])
        self._link()
        self._masks = lru_cache(MASKS)(self._mask_at)

    def _link(self) -> None:
        """Set `shorter` and `banned` of each node, shorter beginnings first."""
        queue = deque([self.root])
        while queue:
            node = queue.popleft()
            shorter = None if node.shorter is None else node.shorter.banned
            own = np.array(node.own, dtype=np.int64) if node.own else None
            node.banned = shorter if own is None else own if shorter is None else np.concatenate([shorter, own])
            for token, longer in node.longer.items():
                longer.shorter = self.root if node.shorter is None else node.shorter.after(token)
                queue.append(longer)

    def constrain(self) -> VocabularyConstraint:
        """Return the constraint of one sequence."""
        return VocabularyConstraint(self)

    def mask_after(self, output: Sequence[int]) -> Tensor | None:
        """Return the mask after an output, which depends on its last `reach` tokens; None = all are allowed."""
        return self.mask_at(reduce(_Node.after, output, self.root))

    def mask_at(self, node: _Node) -> Tensor | None:
        """Return the mask at a node of the automaton; None = all tokens are allowed."""
        return None if node.banned is None and self._is_free else self._masks(node)

    def _mask_at(self, node: _Node) -> Tensor:
        return self._allowed if node.banned is None else without_tokens(self._allowed, node.banned)


class VocabularyConstraint(Constraint):
    """The constraint of a vocabulary, which never ends a text."""

    is_done = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._nodes = [vocabulary.root]  # after each advanced token

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        return self._vocabulary.mask_at(reduce(_Node.after, tokens, self._nodes[-1]))

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
