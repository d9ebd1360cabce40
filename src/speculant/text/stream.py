"""The text of one sequence as its tokens are committed: decoded, and cut at the first stop string."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from speculant.params import SamplingParams
from speculant.text.detokenize import IncrementalDetokenizer, WindowState
from speculant.text.stop import SearchState, StopSearch, StopStrings
from speculant.text.tokenizer import Tokenizer


class _Checkpoint(NamedTuple):
    window: WindowState
    search: SearchState | None
    unsearched: int
    num_pieces: int
    text: str


class TextStream:
    """A `StopChecker`: takes committed tokens and queues the text that each of them made final.

    The end token is not part of the text unless `params.include_stop_str_in_output` is set.

    stops: the compiled stop strings of `params`. The search begins with the text of the min_tokens-th token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, params.detokenize)
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopSearch(stops, self._include_stop) if stops else None
        self._unsearched = params.min_tokens - 1
        self._pieces: deque[str] = deque()
        self.text = ""  # all text released so far
        self._checkpoint = self._state()

    def push(self, token: int) -> str | None:
        """See `StopChecker.push`; `pop` returns the token's piece."""
        piece, stop = self._search(self._detokenizer.push(token))
        self._add(piece)
        return stop

    def push_end(self, token: int) -> None:
        """See `StopChecker.push_end`."""
        if self._include_stop:
            self.push(token)
        else:
            self._add("")

    def checkpoint(self) -> None:
        """See `StopChecker.checkpoint`."""
        self._checkpoint = self._state()

    def rollback(self) -> None:
        """See `StopChecker.rollback`; no piece may have been popped since the checkpoint."""
        to = self._checkpoint
        self._detokenizer.restore(to.window)
        if self._stops is not None and to.search is not None:
            self._stops.restore(to.search)
        self._unsearched, self.text = to.unsearched, to.text
        while len(self._pieces) > to.num_pieces:
            self._pieces.pop()

    def pop(self) -> str:
        """Return the piece of the oldest token that was not popped yet; it may be empty."""
        return self._pieces.popleft()

    def finish(self) -> str:
        """Release the text held back, at the end of the sequence, and return it."""
        piece, stop = self._search(self._detokenizer.flush())
        if self._stops is not None and stop is None:
            piece += self._stops.flush().text
        self._add(piece)
        return piece

    def _state(self) -> _Checkpoint:
        search = self._stops.checkpoint() if self._stops else None
        return _Checkpoint(self._detokenizer.checkpoint(), search, self._unsearched, len(self._pieces), self.text)

    def _search(self, piece: str) -> tuple[str, str | None]:
        if self._stops is None:
            return piece, None
        if self._unsearched > 0:
            self._unsearched -= 1
            return piece, None
        released = self._stops.push(piece)
        return released.text, released.stop

    def _add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.text += piece
