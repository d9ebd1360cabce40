"""N-gram frequency tables over the tokens seen so far: a drafter without a model (docs/references.md, n-gram tables).

Each order has a table from the hash of a context to counts of the tokens that followed it. The longest
known context is used, and of its continuations the most frequent (the first seen on a tie). Each
prediction extends the context of the next one. Drafts are deterministic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from speculant.drafting.base import DrafterContext, Method, StatelessDrafter, read_options
from speculant.errors import ConfigError
from speculant.types import DraftTree, Request

METHOD = Method(default_length=4, lookup_rank=30)  # docs/references.md, n-gram tables
_FNV_OFFSET = 14695981039346656037
_FNV_PRIME = 1099511628211
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Options:
    """min_order and max_order count the predicted token: order 4 looks at three tokens of context.

    history is the window of tokens that contexts are taken from; counts stay when their tokens leave it.
    """

    min_order: int = 2
    max_order: int = 4
    history: int = 512

    def __post_init__(self) -> None:
        if not 2 <= self.min_order <= self.max_order:
            raise ConfigError(
                f"n-gram orders {self.min_order} to {self.max_order} are not a range from 2 upwards",
                "use for example min_order=2, max_order=4.",
            )
        if self.history < self.max_order:
            raise ConfigError(
                f"history={self.history} is shorter than max_order={self.max_order}", "raise history; 512 is usual."
            )


class Predictor:
    """The tables of one sequence."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._history: deque[int] = deque(maxlen=options.history)
        self._tables: dict[int, dict[int, dict[int, int]]] = {
            order: {} for order in range(options.min_order, options.max_order + 1)
        }
        self.seen = 0

    def update(self, tokens: Iterable[int]) -> None:
        """Count tokens that follow everything seen so far."""
        for token in tokens:
            for order, table in self._tables.items():
                if len(self._history) >= order - 1:
                    counts = table.setdefault(context_hash(self._context(order)), {})
                    counts[token] = counts.get(token, 0) + 1
            self._history.append(token)
            self.seen += 1

    def remove(self, kept: Sequence[int], dropped: Sequence[int]) -> None:
        """Undo the update with the last tokens seen: `dropped`, which followed `kept`."""
        for end in range(len(dropped) - 1, -1, -1):
            before = [*kept[1 - self._options.max_order :], *dropped[:end]]
            for order, table in self._tables.items():
                if len(before) >= order - 1:
                    _uncount(table, context_hash(before[len(before) - order + 1 :]), dropped[end])
        self._history = deque(kept[-self._options.history :], self._options.history)
        self.seen -= len(dropped)

    def predict(self, limit: int) -> list[int]:
        """Return up to `limit` likely next tokens, fewer when no context is known."""
        recent = self._context(self._options.max_order)
        predicted: list[int] = []
        while len(predicted) < limit:
            token = self._next(recent)
            if token is None:
                break
            predicted.append(token)
            recent = [*recent, token][1 - self._options.max_order :]
        return predicted

    def _context(self, order: int) -> list[int]:
        return [self._history[i] for i in range(-min(order - 1, len(self._history)), 0)]

    def _next(self, recent: Sequence[int]) -> int | None:
        for order in range(self._options.max_order, self._options.min_order - 1, -1):
            if len(recent) >= order - 1:
                counts = self._tables[order].get(context_hash(recent[len(recent) - order + 1 :]))
                if counts:
                    return max(counts, key=counts.__getitem__)
        return None


def _uncount(table: dict[int, dict[int, int]], context: int, token: int) -> None:
    counts = table[context]
    counts[token] -= 1
    if not counts[token]:
        del counts[token]
    if not counts:
        del table[context]


def context_hash(tokens: Sequence[int]) -> int:
    """Return the 64-bit FNV-1a hash over token ids."""
    state = _FNV_OFFSET
    for token in tokens:
        state = ((state ^ token) * _FNV_PRIME) & _MASK
    return state


class NgramDrafter(StatelessDrafter):
    """One `Predictor` per sequence, over prompt and output."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._predictors: dict[int, Predictor] = {}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._predictors[request.seq_id] = Predictor(self._options)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        return [self._propose_one(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _propose_one(self, request: Request, limit: int) -> DraftTree:
        if limit == 0:
            return DraftTree.empty()
        predictor = self._predictors[request.seq_id]
        predictor.update(request.tokens[predictor.seen :])
        return DraftTree.chain(predictor.predict(limit))

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`."""
        predictor = self._predictors[request.seq_id]
        seen = predictor.seen - len(request.tokens)
        if seen > 0:
            predictor.remove(request.tokens, dropped[:seen])

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._predictors.pop(request.seq_id, None)


def build(context: DrafterContext) -> NgramDrafter:
    """Make the drafter; it needs no model."""
    return NgramDrafter(read_options(context, Options))
