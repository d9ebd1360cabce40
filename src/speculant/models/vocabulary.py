"""Draft models with another vocabulary than the target's: they read its tokens, and draw those that both have."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from speculant.errors import ConfigError
from speculant.models.description import DecoderConfig
from speculant.models.sizes import TABLE
from speculant.models.weights.source import QuantizedBlocks, WeightSource, take_rows


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens of a target's vocabulary that a draft model reads and draws.

    size: rows of the target's head. unknown: ids that only one of the two tokenizers has; they are never drawn.
    substitute: the shared token that the model reads in place of an unknown id. lacks: how many of the target's tokens
    the model does not have.
    """

    size: int
    unknown: frozenset[int]
    substitute: int
    lacks: int = 0

    def drawable(self, rows: int, among: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the ids, ascending, that a model of `rows` tokens may draw; among: at most these, () = all.

        Raises ConfigError if there are none.
        """
        found = tuple(token for token in among or range(rows) if token < self.size and token not in self.unknown)
        if not found:
            raise ConfigError(
                "head_tokens has no token that both the target and the draft model know",
                "make the file with the draft model's tokenizer.",
            )
        return found

    def fit(self, config: DecoderConfig, weights: WeightSource) -> tuple[DecoderConfig, WeightSource]:
        """Return the config and the weights of a model that reads each of the target's tokens.

        Its output head must have the rows of `drawable` tokens already.
        """
        fitted = Substituted(weights, self, config.vocab_size)
        return replace(config, embedding=replace(config.embedding, vocab_size=self.size)), fitted

    def __str__(self) -> str:
        """All that weights depend on."""
        return f"{self.size} {self.substitute} {sorted(self.unknown)}"


@dataclass(frozen=True)
class Substituted:
    """A source whose embedding table has a row for each of a target's tokens: its own one, or the substitute's.

    num_rows: rows of the table in the files.
    """

    source: WeightSource
    vocabulary: DraftVocabulary
    num_rows: int

    def names(self) -> Collection[str]:
        """See `WeightSource.names`."""
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource.shape`."""
        shape = self.source.shape(name)
        return (self.vocabulary.size, *shape[1:]) if name == TABLE else shape

    def kind(self, name: str) -> str:
        """See `WeightSource.kind`."""
        return self.source.kind(name)

    def read(self, name: str) -> Tensor | QuantizedBlocks:
        """See `WeightSource.read`."""
        return take_rows(self.source.read(TABLE), self._rows) if name == TABLE else self.source.read(name)

    @cached_property
    def _rows(self) -> list[int]:
        """The row in the files of each of the target's tokens."""
        known, substitute = set(self.vocabulary.drawable(self.num_rows)), self.vocabulary.substitute
        return [token if token in known else substitute for token in range(self.vocabulary.size)]
