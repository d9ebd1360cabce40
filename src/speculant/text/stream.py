"""The text of one sequence as its tokens are committed: decoded, and cut at the first stop string.

Decoding returns whole characters only, and only text that can no longer change. Stop strings are found across pieces,
and never released in part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import override

from speculant.errors import RequestError
from speculant.params import SamplingParams
from speculant.text.automaton import Beginning, beginnings_of
from speculant.text.sentencepiece import BYTES
from speculant.text.tokenizer import Tokenizer
from speculant.types import StopChecker

_CONTEXT = 8  # tokens; the last character never begins before them
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Released:
    """Text that may be shown, and the stop string that ended the stream, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Stop strings and their automaton, which any number of searches, in any threads, can share."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Time and memory are linear in the characters of all stop strings. Raises RequestError."""
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty, which would stop before the first token", "leave it out.")
        self.texts, self.root = tuple(stops), beginnings_of(stops)


def compile_stops(stops: Sequence[str]) -> StopStrings | None:
    """Compile the stop strings of a request, once for all its samples; None if there are none."""
    return StopStrings(stops) if stops else None


class SearchState(NamedTuple):
    """place: the longest beginning of a stop string with which the text ends. held: text. stop: a completed string."""

    place: Beginning[str]
    held: str = ""
    stop: str | None = None


class StopSearch:
    """Searches a text for the first completed stop string.

    That is the one that ends first; of several that end together, the longest. So the result does not depend on how the
    text was split into pieces. Time is linear in the text. Setting an earlier `state` again rolls the search back.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        """`include` keeps the stop string at the end of the released text."""
        self._stops, self._include = stops, include
        self.state = SearchState(stops.root)

    def push(self, piece: str) -> Released:
        """Add a piece of text; return the text that can no longer be part of a stop string.

        A completed stop string is returned with the last text before it. Text after it is dropped.
        """
        place, held, stop = self.state
        if stop is not None:
            return Released("", stop)
        for index, character in enumerate(piece):
            place = place.after(character)
            if place.ends:
                stop, text = self._stops.texts[place.ends[0]], held + piece[: index + 1]
                self.state = SearchState(place, "", stop)
                return Released(text if self._include else text[: -len(stop)], stop)
        text = held + piece
        cut = len(text) - place.depth
        self.state = SearchState(place, text[cut:])
        return Released(text[:cut])

    def flush(self) -> Released:
        """Return the text held back, at the end of the stream."""
        _, held, stop = self.state
        self.state = SearchState(self._stops.root, "", stop)
        return Released(held, stop)


class WindowState(NamedTuple):
    """The state of an `IncrementalDetokenizer`, for `restore`."""

    window: list[int]  # shared with the detokenizer, which only appends to it or replaces it
    length: int
    returned: int
    open_run: bool


class IncrementalDetokenizer:
    """Decodes one sequence token by token.

    The joined results of all calls are `tokenizer.decode(all ids)`. A decoder's text for a token may
    depend on its neighbours, so a window of recent tokens is decoded together:

        window text   [ already returned | final, returned now | could still change ]

    Text can still change in two cases. A byte-level decoder shows an incomplete character as one U+FFFD at
    the end. A decoder with byte fallback (`<0xE4>` tokens) turns a whole run of such tokens into
    U+FFFD when one of them is invalid, so a run is returned only after its end.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, decodes: bool = True) -> None:
        """decodes: False returns no text for any token."""
        self._tokenizer, self._decodes = tokenizer, decodes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._fallback = _fallback_ids(tokenizer)
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text
        self._open_run = False

    def push(self, token_id: int) -> str:
        """Add a token and return the text that has become final; it may be empty. Amortised O(1)."""
        if not self._decodes or token_id in self._skipped or self._tokenizer.backend.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        self._open_run = token_id in self._fallback
        return "" if self._open_run else self._advance()

    def checkpoint(self) -> WindowState:
        """Return the state for `restore`. O(1)."""
        return WindowState(self._window, len(self._window), self._returned, self._open_run)

    def restore(self, state: WindowState) -> None:
        """Roll back to the checkpoint."""
        self._window, self._returned, self._open_run = state.window, state.returned, state.open_run
        del self._window[state.length :]

    def flush(self) -> str:
        """Return the remaining text at the end of the sequence, an incomplete character as U+FFFD."""
        rest = self._decode()[self._returned :]
        self._window, self._returned = [], 0
        return rest

    def _advance(self) -> str:
        text = self._decode()
        final = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._returned : final]
        self._returned = max(self._returned, final)
        if len(self._window) >= 2 * _CONTEXT:
            self._shorten(held=len(text) - self._returned)
        return piece

    def _shorten(self, held: int) -> None:
        """Drop old tokens. The rest may decode differently at the start, but not in the last `held` characters."""
        self._window = self._window[-_CONTEXT:]
        self._returned = len(self._decode()) - held

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


class TokenOffsets:
    """Where the text of each token begins, in the text of all tokens of a sequence."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, start: int = 0) -> None:
        """start: characters before the sequence."""
        self._detokenizer, self._place = IncrementalDetokenizer(tokenizer, skip_special_tokens), start

    def next(self, token_id: int) -> int:
        """Return the place of the next token's text."""
        place = self._place
        self._place += len(self._detokenizer.push(token_id))
        return place


def _fallback_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the `<0x..>` tokens if the tokenizer's decoder reads them as bytes."""
    if all(step["type"] != "ByteFallback" for step in tokenizer.decoder_steps):
        return frozenset()
    return frozenset(each for each in map(tokenizer.backend.token_to_id, BYTES) if each is not None)


class _Checkpoint(NamedTuple):
    window: WindowState
    search: SearchState | None
    unsearched: int
    num_pieces: int
    text: str


class TextStream(StopChecker):
    """Takes committed tokens and queues the text that each of them made final, for `pop`.

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

    @override
    def push(self, token: int) -> str | None:
        piece, stop = self._search(self._detokenizer.push(token))
        self._add(piece)
        return stop

    @override
    def push_end(self, token: int) -> None:
        if self._include_stop:
            self.push(token)
        else:
            self._add("")

    @override
    def checkpoint(self) -> None:
        self._checkpoint = self._state()

    @override
    def rollback(self) -> None:  # no piece may have been popped since the checkpoint
        to = self._checkpoint
        self._detokenizer.restore(to.window)
        if self._stops is not None and to.search is not None:
            self._stops.state = to.search
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
        search = self._stops.state if self._stops else None
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
