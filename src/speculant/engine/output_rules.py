"""The tokens that a checkpoint forces or bans in its outputs, as a constraint."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speculant.models.generation import OutputRules
from speculant.structured.vocabulary import Vocabulary
from speculant.types import Request


class OutputVocabulary:
    """A checkpoint's `OutputRules` over a vocabulary, for any number of sequences of at most `max_model_len` tokens.

    As in transformers, a forced token may be a banned one.
    """

    def __init__(self, rules: OutputRules, vocab_size: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.banned = Vocabulary(vocab_size, rules.bad_words, None)
        self.first = None if rules.first is None else Vocabulary(vocab_size, (), [rules.first])
        self.last = Vocabulary(vocab_size, (), rules.last) if rules.last else None

    def constrain(self, request: Request) -> OutputConstraint:
        """Return the constraint of one sequence."""
        return OutputConstraint(self, request, self._max_model_len - len(request.prompt))


class OutputConstraint:
    """See `Constraint`. It reads the output of its request, so that it holds for beam searches too.

    room: the most tokens of the output unless max_tokens is lower. The last one is forced unless end tokens are ignored
    or banned there.
    """

    is_done = False

    def __init__(self, vocabulary: OutputVocabulary, request: Request, room: int) -> None:
        params, self._vocabulary, self._request = request.params, vocabulary, request
        longest = min(room, params.max_tokens or room)
        ends = not params.ignore_eos and params.min_tokens < longest
        self._last_place = longest - 1 if ends and vocabulary.last is not None else None
        self._first_place = 0 if vocabulary.first is not None and len(request.prompt) == 1 else None

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        request, vocabulary = self._request, self._vocabulary
        place, chosen = request.num_output + len(tokens), vocabulary.banned
        if place == self._last_place and vocabulary.last is not None:
            chosen = vocabulary.last
        elif place == self._first_place and vocabulary.first is not None:
            chosen = vocabulary.first
        known = request.tokens[max(len(request.prompt), len(request.tokens) - chosen.reach) :]
        return chosen.mask_after([*known, *tokens])

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`; the request has the tokens."""

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`; the request drops the tokens."""
