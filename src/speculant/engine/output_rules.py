"""The tokens that a checkpoint forces or bans in its outputs, as a constraint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from typing_extensions import override

from speculant.constraints import Constraint
from speculant.models import OutputRules
from speculant.structured import JoinedConstraint, Vocabulary
from speculant.types import Request


class OutputVocabulary:
    """A checkpoint's `OutputRules` over a vocabulary, for any number of sequences of at most `max_model_len` tokens.

    As in transformers, a forced token may be a banned one. If the first token is forced, a request's own constraint
    holds for the tokens after it.
    """

    def __init__(self, rules: OutputRules, vocab_size: int, max_model_len: int) -> None:
        self._max_model_len, self._first = max_model_len, rules.first
        self.banned = Vocabulary(vocab_size, rules.bad_words, None)
        self.first = None if rules.first is None else Vocabulary(vocab_size, (), [rules.first])
        self.last = Vocabulary(vocab_size, (), rules.last) if rules.last else None

    def constrain(self, request: Request, own: Constraint | None, *, formed: bool) -> Constraint:
        """Return the constraint of one sequence, whose request has a constraint of its own or None.

        formed: the request's constraint decides which token may be the last one, as forms do.
        """
        rules = OutputConstraint(self, request, self._max_model_len - len(request.prompt), formed=formed)
        if own is None:
            return rules
        first = self.first_of(request)
        return JoinedConstraint(own if first is None else AfterFirst(own, request, first), rules)

    def first_of(self, request: Request) -> int | None:
        """Return the token that an output begins with; None = it is not forced."""
        return self._first if len(request.prompt) == 1 else None


class AfterFirst(Constraint):
    """Applies another constraint to the output after its first token, which is forced.

    The other constraint does not see that token. This one reads the output of its request, as `OutputConstraint` does.
    """

    def __init__(self, rest: Constraint, request: Request, first: int) -> None:
        self._rest, self._request, self._first = rest, request, first

    @property
    def _begins(self) -> bool:
        return self._request.num_output == 0

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        if self._begins and not tokens:
            return None
        return self._rest.mask(tokens[1:] if self._begins else tokens)

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """The request gets the tokens afterwards."""
        rest = tokens[1:] if self._begins else tokens
        if rest:
            self._rest.advance(rest)

    @override
    def rollback(self, n: int) -> None:
        """The request drops the tokens afterwards."""
        count = min(n, self._request.num_output - 1)
        if count > 0:
            self._rest.rollback(count)

    @property
    @override
    def is_done(self) -> bool:
        return not self._begins and self._rest.is_done

    @override
    def forced(self) -> list[int]:
        return [*([self._first] if self._begins else []), *self._rest.forced()]

    @override
    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
        self._rest.prepare((path[1:] for path in paths if path) if self._begins else paths)


class OutputConstraint(Constraint):
    """A checkpoint's rules. It reads the output of its request, so that it holds for beam searches too.

    room: the most tokens of the output unless max_tokens is lower. The last one is forced unless end tokens are ignored
    or banned there. formed: the last one is not forced.
    """

    is_done = False

    def __init__(self, vocabulary: OutputVocabulary, request: Request, room: int, *, formed: bool) -> None:
        params, self._vocabulary, self._request = request.params, vocabulary, request
        longest = min(room, params.max_tokens or room)
        ends = not params.ignore_eos and params.min_tokens < longest and not formed
        self._last_place = longest - 1 if ends and vocabulary.last is not None else None
        self._first_place = None if vocabulary.first_of(request) is None else 0

    @override
    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        request, vocabulary = self._request, self._vocabulary
        place, chosen = request.num_output + len(tokens), vocabulary.banned
        if place == self._last_place and vocabulary.last is not None:
            chosen = vocabulary.last
        elif place == self._first_place and vocabulary.first is not None:
            chosen = vocabulary.first
        known = request.tokens[max(len(request.prompt), len(request.tokens) - chosen.reach) :]
        return chosen.mask_after([*known, *tokens])

    @override
    def advance(self, tokens: Sequence[int]) -> None:
        """The request has the tokens."""

    @override
    def rollback(self, n: int) -> None:
        """The request drops the tokens."""
