"""A compiled grammar as a `Constraint` of one sequence."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from speculant.errors import Converts, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

SIMPLIFY = "simplify it: fewer alternatives, shorter repetitions, smaller bounds."
_MATCHING = Converts(RequestError, "the grammar of this request failed", SIMPLIFY)
WORD = 32  # bits
HANDOVER_S = 3e-4  # of masks to another thread: shorter work is left to whoever asks for it
_NEWEST = 0.2  # weight of the newest mask in the mean time of one


@dataclass(frozen=True)
class Grammar:
    """A grammar over a vocabulary of `vocab_size` tokens, ready for any number of sequences.

    begin: returns a matcher at the beginning. workers: where masks are computed ahead; None = nowhere. Ids from
    `vocab_size` on, such as the padded rows of a model's head, are forbidden.
    """

    begin: Callable[[], LLMatcher]
    vocab_size: int
    end_token_ids: frozenset[int]
    workers: Executor | None = None

    def constrain(self) -> GrammarConstraint:
        """Return the constraint of one sequence."""
        return GrammarConstraint(self)


class GrammarConstraint:
    """See `Constraint`. The matcher stands behind the advanced tokens and `_path`, which are drafted ones.

    End tokens are not fed to it. Masks along a draft are kept until the next tokens are advanced, so that draft and
    target compute each one once.

    A matcher that exceeds its limits is of no more use; it is replaced by one that has taken the advanced tokens again.
    So what a draft leads to can't end a request: behind such a draft no token may follow.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._matcher = grammar, grammar.begin()
        self._taken: list[int] = []
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._work: Future[None] | None = None
        self.mask_s = 0.0  # mean time of the last masks
        self._failure = ""  # what the last matcher that was replaced had come to

    def mask(self, tokens: Sequence[int]) -> Tensor:
        """See `Constraint.mask`. Raises RequestError if the grammar exceeds its limits behind the advanced tokens."""
        self._settle()
        return self._mask(tuple(tokens))

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`; raises RequestError for tokens that the grammar forbids."""
        self._settle()
        self._failure = ""
        with _MATCHING:
            if not self._move_to(tokens):
                raise self._over_limits() if self._failure else _forbidden(tokens)
        self._taken += tokens
        self._path = []
        new, count = tuple(tokens), len(tokens)
        self._masks = {path[count:]: mask for path, mask in self._masks.items() if path[:count] == new}

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        self._settle()
        self._masks.clear()
        with _MATCHING:
            fed = max(0, n - self._has_ended(())) + len(self._path)
            undone = not fed or self._matcher.rollback(fed)
        del self._taken[len(self._taken) - n :]
        self._path = []
        if not undone:
            self._begin_again()

    @property
    def is_done(self) -> bool:
        """See `Constraint.is_done`; it depends on the advanced tokens alone."""
        if self._has_ended(()):
            return True
        self._settle()
        with _MATCHING:
            if not (self._move_to(()) and self._matcher.is_accepting()):
                return False
        return not without_tokens(self._mask(()), self._grammar.end_token_ids).any()

    def forced(self) -> list[int]:
        """See `forced_tokens`: those in which the tokenizer writes the only bytes that may follow."""
        self._settle()
        with _MATCHING:
            tokens = self._matcher.compute_ff_tokens() if self._move_to(()) else []
            if self._matcher.is_error():
                self._begin_again()
                return []
        stop = next((place for place, token in enumerate(tokens) if not self._may_go_on(token)), len(tokens))
        return list(tokens[:stop])

    def prepare(self, paths: Sequence[Sequence[int]]) -> None:
        """See `prepare_masks`; it does nothing where masks take less than handing them over."""
        self._settle()
        missing = [path for path in map(tuple, paths) if path not in self._masks]
        if self._grammar.workers is not None and len(missing) * self.mask_s > HANDOVER_S:
            self._work = self._grammar.workers.submit(self._fill, missing)

    def _fill(self, paths: Sequence[tuple[int, ...]]) -> None:
        for path in paths:
            self._mask(path)

    def _settle(self) -> None:
        """Wait until no other thread uses the matcher. What has not begun is left to whoever needs it."""
        work, self._work = self._work, None
        if work is not None and not work.cancel():
            work.exception()  # an error comes again where the mask is asked for

    def _mask(self, path: tuple[int, ...]) -> Tensor:
        if path not in self._masks:
            started = time.perf_counter()
            self._masks[path] = self._compute(path)
            self.mask_s += _NEWEST * (time.perf_counter() - started - self.mask_s)
        return self._masks[path]

    def _compute(self, path: tuple[int, ...]) -> Tensor:
        nothing = torch.zeros(-(-self._grammar.vocab_size // WORD), dtype=torch.int32)
        with _MATCHING:
            if not self._move_to(path) or self._has_ended(path):
                return nothing
            words = np.zeros_like(nothing.numpy())
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not self._matcher.is_error():
                return torch.from_numpy(words)
            self._begin_again()
        if not path:
            raise self._over_limits()
        return nothing

    def _move_to(self, path: Sequence[int]) -> bool:
        """Let the matcher stand behind a path; False if the grammar forbids it, and then it stands before that."""
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
                self._begin_again()
        rest = list(path[len(self._path) :])
        self._path += rest[: self._matcher.try_consume_tokens(rest)]
        if self._matcher.is_error():
            self._begin_again()
            return not path
        return len(self._path) == len(path)

    def _has_ended(self, path: Sequence[int]) -> bool:
        """Whether an end token is the last of the advanced tokens and a path."""
        last = path[-1] if path else self._taken[-1] if self._taken else -1
        return last in self._grammar.end_token_ids

    def _may_go_on(self, token: int) -> bool:
        return token < self._grammar.vocab_size and token not in self._grammar.end_token_ids

    def _begin_again(self) -> None:
        """Replace the matcher by one that stands behind the advanced tokens."""
        self._failure = self._matcher.get_error()
        self._matcher, self._path = self._grammar.begin(), []
        fed = self._taken[: len(self._taken) - self._has_ended(())]
        if self._matcher.try_consume_tokens(fed) != len(fed):
            raise self._over_limits()

    def _over_limits(self) -> RequestError:
        return RequestError(f"the grammar of this request exceeds its limits: {shortened(self._failure)}", SIMPLIFY)


def _forbidden(tokens: Sequence[int]) -> RequestError:
    return RequestError(
        f"the grammar of this request forbids the tokens {list(tokens)}", "commit what its mask allows."
    )


def shortened(reason: str) -> str:
    """Return an error of the library in a line, without the trace of its own calls."""
    line = " ".join(reason.partition("<backtrace>")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."


def without_tokens(mask: Tensor, tokens: Iterable[int]) -> Tensor:
    """Return a mask that forbids some tokens too."""
    words = mask.clone()
    for token in tokens:
        words.numpy().view(np.uint32)[token // WORD] &= np.uint32(~(1 << token % WORD) & 0xFFFFFFFF)
    return words


def with_tokens(mask: Tensor, tokens: Iterable[int]) -> Tensor:
    """Return a mask that allows some tokens too."""
    words = mask.clone()
    for token in tokens:
        words.numpy().view(np.uint32)[token // WORD] |= np.uint32(1 << token % WORD)
    return words


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
