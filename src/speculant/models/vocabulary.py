"""Draft models whose vocabulary is not the target's: they read its texts, and draw tokens that both have.

A draft model that only lacks some of the target's tokens keeps its ids (`DraftVocabulary`). One of another family gets
the target's ids for the tokens that both have (`MappedVocabulary`): token-level intersection, arXiv 2502.05202.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from speculant.errors import ConfigError
from speculant.models.description import DecoderConfig
from speculant.models.sizes import HEAD, TABLE
from speculant.models.weights.source import QuantizedBlocks, ShortHead, WeightSource, order_of, take_rows

Fitted = tuple[DecoderConfig, WeightSource]


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a target's vocabulary that a draft model reads and draws, where equal ids are equal tokens.

    size: rows of the target's head. unknown: ids that only one of the two tokenizers has; they are never drawn.
    substitute: the shared token that the model reads in place of an unknown id. lacks: how many of the target's tokens
    the model does not have.
    """

    size: int
    unknown: frozenset[int]
    substitute: int
    lacks: int = 0

    def fit(self, config: DecoderConfig, weights: WeightSource, among: Sequence[int] = ()) -> Fitted:
        """Return the config and the weights of a model that reads each of the target's tokens and draws shared ones.

        among: at most these are drawn, in ascending order; () = all. Raises ConfigError if none of them is shared.
        """
        drawn = self.drawable(config.vocab_size, among)
        return _fit(config, weights, drawn, self.head(drawn), self.table(config.vocab_size))

    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the ids, ascending, that a model of `rows` tokens may draw; see `fit`."""
        return _some([token for token in among or range(rows) if token < rows and self._has(token)])

    def head(self, drawn: Sequence[int]) -> list[int]:
        """Return the row of the model's own head for each drawn id."""
        return list(drawn)

    def table(self, rows: int) -> list[int]:
        """Return the row of the model's own table, which has `rows`, for each id that it reads."""
        return [token if token < rows and self._has(token) else self.substitute for token in range(self.size)]

    def _has(self, token: int) -> bool:
        return token < self.size and token not in self.unknown

    def __str__(self) -> str:
        """All that weights depend on."""
        return f"{self.size} {self.substitute} {sorted(self.unknown)}"


@dataclass(frozen=True, eq=False)
class MappedVocabulary:
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
    def lacks(self) -> int:
        """How many of the target's ids are never drafted."""
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

    def fit(self, config: DecoderConfig, weights: WeightSource, among: Sequence[int] = ()) -> Fitted:
        """Return the config and the weights of a model that reads and draws these ids.

        among: at most these of the target's ids are drawn, in ascending order; () = all. Raises ConfigError if none of
        them is shared.
        """
        drawn = self.drawable(config.vocab_size, among)
        return _fit(config, weights, drawn, self.head(drawn), self.table(config.vocab_size))

    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the target's ids, ascending, that a model of `rows` tokens may draw; see `fit`."""
        return _some([each for each in among or sorted(self.shared) if self.shared.get(each, rows) < rows])

    def head(self, drawn: Sequence[int]) -> list[int]:
        """Return the row of the model's own head for each drawn id."""
        return [self.shared[each] for each in drawn]

    def table(self, rows: int) -> list[int]:
        """Return the row of the model's own table, which has `rows`, for each id that it reads."""
        read = [*(self.shared.get(each, self.substitute) for each in range(self.size)), *self.own]
        return [row if row < rows else self.substitute for row in read]

    def __str__(self) -> str:
        """All that weights depend on."""
        facts = f"{sorted(self.shared.items())} {self.own}"
        return f"{self.size} {self.substitute} {hashlib.sha256(facts.encode()).hexdigest()}"


def _some(found: Sequence[int]) -> tuple[int, ...]:
    if not found:
        raise ConfigError(
            "head_tokens has no token that both the target and the draft model know",
            "make the file with the draft model's tokenizer.",
        )
    return tuple(found)


def _fit(
    config: DecoderConfig, weights: WeightSource, tokens: Sequence[int], head: Sequence[int], table: Sequence[int]
) -> Fitted:
    """Return a model that draws `tokens`, by the rows `head` of its own head, and reads the rows `table` of its own.

    Its mask token has the last id.
    """
    short, mask = ShortHead(weights, tuple(head), TABLE if config.head.tied else HEAD), config.embedding.mask
    if mask is not None:
        table, mask = [*table, mask], len(table)
    embedding = replace(config.embedding, vocab_size=len(table), mask=mask)
    fitted = replace(config.with_head(tuple(tokens)), embedding=embedding)
    return fitted, TableRows(short, table)


@dataclass(frozen=True)
class TableRows:
    """A source whose embedding table consists of these rows of the stored one."""

    source: WeightSource
    rows: Sequence[int]

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        shape = self.source.shape(name)
        return (len(self.rows), *shape[1:]) if name == TABLE else shape

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return self.source.kind(name)

    def order(self, name: str) -> Tensor | None:
        """See `HasOrders.order`."""
        return order_of(self.source, name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        return take_rows(self.source.read(TABLE), self.rows) if name == TABLE else self.source.read(name)


TargetVocabulary = DraftVocabulary | MappedVocabulary
