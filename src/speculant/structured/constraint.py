"""A compiled grammar as a `Constraint` of one sequence, from its beginning or after a model's reasoning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from speculant.constraints import Constraint
from speculant.errors import ConstraintError, Converts, RequestError
from speculant.structured.lanes import Allowance
from speculant.structured.library import has_no_text, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

SIMPLIFY = "simplify it: fewer alternatives, shorter repetitions, smaller bounds."
_MATCHING = Converts(RequestError, "the grammar of this request failed", SIMPLIFY)
WORD = 32  # bits
HANDOVER_S = 3e-4  # seconds to hand masks over to another thread; shorter work is done when it is needed
_NEWEST = 0.2  # weight of the newest mask in the mean time per mask
T = TypeVar("T")


@dataclass(frozen=True)
class Grammar:
    """A grammar over a vocabulary of `vocab_size` tokens, ready for any number of sequences.

    begin: returns a matcher at the beginning. workers: threads that compute masks ahead; None = none. Ids from
    `vocab_size` on, such as the padded rows of a model's head, are forbidden. allowance: bounds the time of its
    matchers; None = it has no bound.
    """

    begin: Callable[[], LLMatcher]
    vocab_size: int
    end_token_ids: frozenset[int]
    workers: Executor | None = None
    allowance: Allowance | None = None

    def constrain(self) -> GrammarConstraint:
        """Return the constraint of one sequence."""
        return GrammarConstraint(self)


class GrammarConstraint(Constraint):
    """The matcher has consumed the advanced tokens and then `_path`, which are drafted tokens.

    It does not consume end tokens. Masks along a draft are kept until the next tokens are advanced, so each is computed
    once for draft and target.

    A matcher that exceeds its limits can't be used any more. It is replaced by a new one that consumes the advanced
    tokens again. So a draft can't fail a request: after a draft that exceeds the limits, all tokens are forbidden. The
    same holds for masks that a grammar's allowance does not cover.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.begin()
        self._advanced: list[int] = []
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._work: Future[None] | None = None
        self.mask_s = 0.0  # mean time of the last masks
        self._failure = ""  # the error of the matcher that was replaced last
        self._failed = False  # whether the mask after the advanced tokens exceeds the limits
        self._beyond = self._nothing()  # the mask after a draft that exceeds the limits

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor:
        """Raises ConstraintError if the grammar exceeds its limits after the advanced tokens."""
        self._await_work()
        return self._mask(tuple(tokens))

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """Raises RequestError for tokens that the grammar forbids."""
        self._await_work()
        self._failure, self._failed = "", False
        with _MATCHING:
            if not self._timed(lambda: self._move_to(tokens)):
                raise self._over_limits() if self._failure else _forbidden(tokens)
        self._advanced += tokens
        self._path = []
        new, count = tuple(tokens), len(tokens)
        self._masks = {
            path[count:]: mask
            for path, mask in self._masks.items()
            if path[:count] == new and mask is not self._beyond  # which is an error after tokens that are not drafted
        }

    @override
    def rollback(self, n: int) -> None:
        self._await_work()
        self._failed = False
        self._masks.clear()
        with _MATCHING:
            fed = max(0, n - self._has_ended(())) + len(self._path)
            undone = not fed or self._matcher.rollback(fed)
        del self._advanced[len(self._advanced) - n :]
        self._path = []
        if not undone:
            self._restart()

    @property
    @override
    def is_done(self) -> bool:
        if self._has_ended(()):
            return True
        self._await_work()
        with _MATCHING:
            if not self._timed(lambda: self._move_to(()) and self._matcher.is_accepting()):
                return False
        return not without_tokens(self._mask(()), self._grammar.end_token_ids).any()

    @override
    def forced(self) -> list[int]:
        """The tokenizer's tokens for the only bytes that may follow."""
        self._await_work()
        if self._refusal is not None:
            return []
        with _MATCHING:
            tokens = self._timed(lambda: self._matcher.compute_ff_tokens() if self._move_to(()) else [])
            if self._matcher.is_error():
                self._restart()
                return []
        stop = next((place for place, token in enumerate(tokens) if not self._may_go_on(token)), len(tokens))
        return list(tokens[:stop])

    @override
    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
        """Does nothing if computing the masks is faster than handing them over."""
        self._await_work()
        missing = [path for path in map(tuple, paths) if path not in self._masks]
        if self._grammar.workers is not None and len(missing) * self.mask_s > HANDOVER_S:
            self._work = self._grammar.workers.submit(self._fill, missing)

    def _fill(self, paths: Sequence[tuple[int, ...]]) -> None:
        for path in paths:
            self._mask(path)

    def _await_work(self) -> None:
        """Wait until no other thread uses the matcher. Cancel work that has not begun."""
        work, self._work = self._work, None
        if work is not None and not work.cancel():
            work.exception()  # an error is raised again when the mask is needed

    def _mask(self, path: tuple[int, ...]) -> Tensor:
        if path not in self._masks:
            if (refusal := self._refusal) is not None:
                if not path:
                    raise refusal
                return self._nothing()
            started = time.perf_counter()
            self._masks[path] = self._timed(lambda: self._compute(path))
            self.mask_s += _NEWEST * (time.perf_counter() - started - self.mask_s)
        return self._masks[path]

    def _compute(self, path: tuple[int, ...]) -> Tensor:
        nothing = self._nothing()
        if self._failed and not path:
            raise self._over_limits()
        with _MATCHING:
            if not self._move_to(path) or self._has_ended(path):
                return nothing
            words = np.zeros_like(nothing.numpy())
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not self._matcher.is_error():
                return torch.from_numpy(words)
            self._restart()
        if not path:
            self._failed = True
            raise self._over_limits()
        return self._beyond

    def _nothing(self) -> Tensor:
        return torch.zeros(-(-self._grammar.vocab_size // WORD), dtype=torch.int32)

    @property
    def _refusal(self) -> ConstraintError | None:
        """The error of a grammar that took too long."""
        return None if self._grammar.allowance is None else self._grammar.allowance.refusal

    def _timed(self, call: Callable[[], T]) -> T:
        """Return the result of a call, and count its processor time."""
        if self._grammar.allowance is None:
            return call()
        started = time.thread_time()
        try:
            return call()
        finally:
            self._grammar.allowance.spend(time.thread_time() - started)

    def _move_to(self, path: Sequence[int]) -> bool:
        """Move the matcher to the end of a path. Return False if the grammar forbids it, and stop before that token."""
        if path and self._has_ended(()):
            return False
        if path and self._has_ended(path):
            return self._move_to(path[:-1]) and self._matcher.is_accepting()
        if not all(map(self._may_go_on, path)):
            return False
        agreed = _common(self._path, path)
        if agreed < len(self._path):
            undone = self._matcher.rollback(len(self._path) - agreed)
            del self._path[agreed:]
            if not undone:
                self._restart()
        rest = list(path[len(self._path) :])
        self._path += rest[: self._matcher.try_consume_tokens(rest)]
        if self._matcher.is_error():
            self._restart()
            return not path
        return len(self._path) == len(path)

    def _has_ended(self, path: Sequence[int]) -> bool:
        """Whether an end token is the last of the advanced tokens and a path."""
        last = path[-1] if path else self._advanced[-1] if self._advanced else -1
        return last in self._grammar.end_token_ids

    def _may_go_on(self, token: int) -> bool:
        return token < self._grammar.vocab_size and token not in self._grammar.end_token_ids

    def _restart(self) -> None:
        """Replace the matcher by a new one that has consumed the advanced tokens."""
        self._failure = self._matcher.get_error()
        self._matcher, self._path = self._grammar.begin(), []
        fed = self._advanced[: len(self._advanced) - self._has_ended(())]
        if self._matcher.try_consume_tokens(fed) != len(fed):
            raise self._over_limits()

    def _over_limits(self) -> ConstraintError:
        reason = reason_of(self._failure)
        if has_no_text(self._failure):
            return ConstraintError(f"the form of this request can't be written: {reason}", "correct it.")
        return ConstraintError(f"the grammar of this request exceeds its limits: {reason}", SIMPLIFY)


def _forbidden(tokens: Sequence[int]) -> RequestError:
    return RequestError(
        f"the grammar of this request forbids the tokens {list(tokens)}", "commit only tokens that its mask allows."
    )


def without_tokens(mask: Tensor, tokens: Iterable[int]) -> Tensor:
    """Return a mask that also forbids some tokens."""
    words, ids = mask.clone(), _ids(tokens)
    np.bitwise_and.at(words.numpy().view(np.uint32), ids // WORD, ~_bits(ids))
    return words


def with_tokens(mask: Tensor, tokens: Iterable[int]) -> Tensor:
    """Return a mask that also allows some tokens."""
    words, ids = mask.clone(), _ids(tokens)
    np.bitwise_or.at(words.numpy().view(np.uint32), ids // WORD, _bits(ids))
    return words


def _ids(tokens: Iterable[int]) -> NDArray[np.int64]:
    return tokens if isinstance(tokens, np.ndarray) else np.array([*tokens], dtype=np.int64)


def _bits(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return the bit of each token in its word of a mask."""
    return np.left_shift(np.uint32(1), (ids % WORD).astype(np.uint32), dtype=np.uint32)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


@dataclass(frozen=True)
class Reasoning:
    """The tokens before and after the reasoning. opened: the prompt ends with the first one.

    If it does not, the first output token decides: it is the start token, or belongs to the form.
    """

    start: int
    end: int
    opened: bool = False


class ReasonedConstraint(Constraint):
    """A form after reasoning. During the reasoning all tokens but end tokens are allowed; then the form begins."""

    def __init__(self, grammar: Grammar, reasoning: Reasoning) -> None:
        self._form: GrammarConstraint = grammar.constrain()
        self._reasoning = reasoning
        self._count = 0  # of all advanced tokens
        self._begins: int | None = None  # how many of them precede the form; None = unknown yet
        everything = torch.full((-(-grammar.vocab_size // WORD),), -1, dtype=torch.int32)
        self._free = without_tokens(everything, grammar.end_token_ids)

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor:
        before = self._before_form(tokens)
        if before is not None:
            return self._form.mask(tokens[before:])
        if tokens or self._reasons:
            return self._free
        return with_tokens(self._form.mask(()), [self._reasoning.start])

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        before = self._before_form(tokens)
        if before is not None:
            if len(tokens) > before:
                self._form.advance(tokens[before:])
            if self._begins is None:
                self._begins = self._count + before
        self._count += len(tokens)

    @override
    def rollback(self, n: int) -> None:
        kept = self._count - n
        if self._begins is not None:
            if undone := self._count - max(kept, self._begins):
                self._form.rollback(undone)
            if kept < self._begins or not kept:
                self._begins = None
        self._count = kept

    @property
    @override
    def is_done(self) -> bool:
        return self._begins is not None and self._form.is_done

    @override
    def forced(self) -> list[int]:
        return [] if self._begins is None else self._form.forced()

    @override
    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
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
