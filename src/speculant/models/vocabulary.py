"""Draft models whose vocabulary is not the target's: they read its texts, and draw tokens that both have.

A draft model that only lacks some of the target's tokens keeps its ids (`DraftVocabulary`). One of another family gets
the target's ids for the tokens that both have (`MappedVocabulary`): token-level intersection, arXiv 2502.05202.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from typing_extensions import override

from speculant.errors import ConfigError
from speculant.models.description import DecoderConfig
from speculant.models.sizes import HEAD, HEAD_BIAS, TABLE
from speculant.models.weights.source import Mapped

Fitted = tuple[DecoderConfig, Mapped]


class TargetVocabulary(ABC):
    """A target's vocabulary, as a draft model reads and draws it.

    size: rows of the target's head. Its text is all that weights depend on.
    """

    size: int

    @property
    @abstractmethod
    def lacks(self) -> int:
        """How many of the target's tokens are never drafted."""

    @abstractmethod
    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the target's ids, ascending, that a model of `rows` tokens may draw; see `fit`."""

    @abstractmethod
    def head(self, drawn: Sequence[int]) -> list[int]:
        """Return the row of the model's own head for each drawn id."""

    @abstractmethod
    def table(self, rows: int) -> list[int]:
        """Return the row of the model's own table, which has `rows`, for each id that it reads."""

    def fit(self, config: DecoderConfig, weights: Mapped, among: Sequence[int] = ()) -> Fitted:
        """Return the config and the weights of a model that reads each of these ids and draws shared ones.

        among: at most these of the target's ids are drawn, in ascending order; () = all. A mask token has the last id.
        Raises ConfigError if none of them is shared.
        """
        drawn, table, mask = self.drawable(config.vocab_size, among), self.table(config.vocab_size), None
        if config.embedding.mask is not None:
            table, mask = [*table, config.embedding.mask], len(table)
        embedding = replace(config.embedding, vocab_size=len(table), mask=mask)
        fitted = replace(config.with_head(drawn), embedding=embedding)
        return fitted, weights.with_rows({**head_rows(config, weights, self.head(drawn)), TABLE: (TABLE, table)})


def head_rows(config: DecoderConfig, weights: Mapped, rows: Sequence[int]) -> dict[str, tuple[str, Sequence[int]]]:
    """Return of what the head of a model with these rows of its head consists; see `Mapped.with_rows`."""
    bias = {HEAD_BIAS: (HEAD_BIAS, rows)} if HEAD_BIAS in weights.shapes else {}
    return {HEAD: (TABLE if config.head.tied else HEAD, rows), **bias}


def with_short_head(config: DecoderConfig, weights: Mapped, tokens: tuple[int, ...]) -> Fitted:
    """Return the config and the weights of a model whose head has the rows of these tokens only; () = all.

    Raises ConfigError for a token that the model does not have.
    """
    if not tokens:
        return config, weights
    if not 0 <= tokens[0] <= tokens[-1] < config.vocab_size:
        raise ConfigError(
            f"head_tokens has the tokens {tokens[0]} to {tokens[-1]} and the draft model has {config.vocab_size}",
            "make the file with this model's tokenizer.",
        )
    return config.with_head(tokens), weights.with_rows(head_rows(config, weights, tokens))


@dataclass(frozen=True)
class DraftVocabulary(TargetVocabulary):
    """The tokens of a target's vocabulary that a draft model reads and draws, where equal ids are equal tokens.

    size: rows of the target's head. unknown: ids that only one of the two tokenizers has; they are never drawn.
    substitute: the shared token that the model reads in place of an unknown id. lacks: how many of the target's tokens
    the model does not have.
    """

    size: int
    unknown: frozenset[int]
    substitute: int
    lacks: int = 0

    @override
    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        return _some([token for token in among or range(rows) if token < rows and self._has(token)])

    @override
    def head(self, drawn: Sequence[int]) -> list[int]:
        return list(drawn)

    @override
    def table(self, rows: int) -> list[int]:
        return [token if token < rows and self._has(token) else self.substitute for token in range(self.size)]

    def _has(self, token: int) -> bool:
        return token < self.size and token not in self.unknown

    def __str__(self) -> str:
        return f"{self.size} {self.substitute} {sorted(self.unknown)}"


@dataclass(frozen=True, eq=False)
class MappedVocabulary(TargetVocabulary):
    """A target's vocabulary for a draft model whose ids mean other tokens. The model reads and draws ids of both.

        id        0 .. size - 1                          size, size + 1, ..
        token     the target's, if the draft has it      the draft's own: `own` in order

    A text is read token by token. A shared token stays as it is; any other token becomes the draft's tokens that spell
    it, or the substitute. So a text that grows only appends ids, and drafts, which have only shared tokens, need no
    translation.

    size: rows of the target's head. shared: the draft's id of each shared token, by the target's id. own: the draft's
    ids of its other tokens. spell: returns the draft's ids for one of the target's tokens that is not shared. lead: the
    draft's ids that are read before a text whose first token is not in `begins`. substitute: the draft's id of the
    token that is read for ids without a meaning.
    """

    size: int
    shared: Mapping[int, int]
    own: tuple[int, ...]
    spell: Callable[[int], Sequence[int]]
    lead: tuple[int, ...] = ()
    begins: frozenset[int] = frozenset()
    substitute: int = 0
    _pieces: dict[int, list[int]] = field(default_factory=dict, init=False)  # by token, of those that were read so far

    @property
    @override
    def lacks(self) -> int:
        return self.size - len(self.shared)

    def begin(self, tokens: Sequence[int]) -> list[int]:
        """Return the ids that are read before a text that begins with these tokens."""
        return [] if not tokens or tokens[0] in self.begins else [self._ids[each] for each in self.lead]

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Return the ids that a part of a text is read as."""
        found = list[int]()
        for token in tokens:
            found += self._pieces.get(token) or self._read_one(token)
        return found

    def _read_one(self, token: int) -> list[int]:
        own = () if token in self.shared else self.spell(token) or (self.substitute,)
        self._pieces[token] = read = [self._ids[each] for each in own] or [token]
        return read

    @cached_property
    def _ids(self) -> dict[int, int]:
        """The ids that stand for the draft's tokens."""
        further = {draft: self.size + place for place, draft in enumerate(self.own)}
        return further | {draft: token for token, draft in self.shared.items()}

    def split(self, tokens: Sequence[int]) -> list[list[int]]:
        """Return the ids that a whole text is read as, token by token; the first ones begin with the lead."""
        read = [self.read([token]) for token in tokens]
        return [[*self.begin(tokens), *first] for first in read[:1]] + read[1:]

    def draft_tokens(self, read: Sequence[int]) -> list[int]:
        """Return the draft's tokens in its own ids."""
        return [self.shared[each] if each < self.size else self.own[each - self.size] for each in read]

    @override
    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        return _some([each for each in among or sorted(self.shared) if self.shared.get(each, rows) < rows])

    @override
    def head(self, drawn: Sequence[int]) -> list[int]:
        return [self.shared[each] for each in drawn]

    @override
    def table(self, rows: int) -> list[int]:
        read = [*(self.shared.get(each, self.substitute) for each in range(self.size)), *self.own]
        return [row if row < rows else self.substitute for row in read]

    def __str__(self) -> str:
        facts = f"{sorted(self.shared.items())} {self.own}"
        return f"{self.size} {self.substitute} {hashlib.sha256(facts.encode()).hexdigest()}"


def _some(found: Sequence[int]) -> tuple[int, ...]:
    if not found:
        raise ConfigError(
            "head_tokens has no token that both the target and the draft model know",
            "make the file with the draft model's tokenizer.",
        )
    return tuple(found)
