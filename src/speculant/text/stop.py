"""Stop strings in streamed text: found across pieces, and never released in part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from speculant.errors import RequestError


@dataclass(frozen=True)
class Released:
    """Text that may be shown, and the stop string that ended the stream, if any."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class _State:
    """The longest end of the text that begins a stop string (Aho-Corasick)."""

    depth: int
    follow: dict[str, _State] = field(default_factory=dict)
    shorter: _State | None = None  # the next longest end of the text that begins a stop string
    stop: str | None = None  # the longest stop string that ends at this state


class StopStrings:
    """Stop strings, compiled to an automaton (Aho and Corasick, doi:10.1145/360825.360855).

    It is immutable, so any number of searches, in any threads, can share it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Time and memory are linear in the characters of all stop strings. Raises RequestError."""
        if any(not stop for stop in stops):
            raise RequestError("a stop string is empty, which would stop before the first token", "leave it out.")
        self.root = _automaton(stops)


def compile_stops(stops: Sequence[str]) -> StopStrings | None:
    """Compile the stop strings of a request, once for all its samples; None if there are none."""
    return StopStrings(stops) if stops else None


class SearchState(NamedTuple):
    """The state of a `StopSearch`, for `restore`."""

    place: _State
    held: str
    stop: str | None


class StopSearch:
    """Searches a text for the first completed stop string.

    That is the one that ends first; of several that end together, the longest. So the result does not
    depend on how the text was split into pieces. Time is linear in the text.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        """`include` keeps the stop string at the end of the released text."""
        self._root, self._include = stops.root, include
        self._state, self._held = self._root, ""
        self._stop: str | None = None

    def checkpoint(self) -> SearchState:
        """Return the state for `restore`."""
        return SearchState(self._state, self._held, self._stop)

    def restore(self, state: SearchState) -> None:
        """Roll back to the checkpoint."""
        self._state, self._held, self._stop = state.place, state.held, state.stop

    def push(self, piece: str) -> Released:
        """Add a piece of text; return the text that can no longer be part of a stop string.

        A completed stop string is returned with the last text before it. Text after it is dropped.
        """
        if self._stop is not None:
            return Released("", self._stop)
        for index, character in enumerate(piece):
            self._state = _step(self._state, character)
            if self._state.stop is not None:
                return self._finish(self._held + piece[: index + 1], self._state.stop)
        return self._release(self._held + piece)

    def flush(self) -> Released:
        """Return the text held back, at the end of the stream."""
        text, self._held = self._held, ""
        self._state = self._root
        return Released(text, self._stop)

    def _finish(self, text: str, stop: str) -> Released:
        self._stop, self._held = stop, ""
        return Released(text if self._include else text[: -len(stop)], stop)

    def _release(self, text: str) -> Released:
        cut = len(text) - self._state.depth
        self._held = text[cut:]
        return Released(text[:cut])


def _step(state: _State, character: str) -> _State:
    while character not in state.follow:
        if state.shorter is None:
            return state
        state = state.shorter
    return state.follow[character]


def _automaton(stops: Sequence[str]) -> _State:
    root = _State(0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.follow.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    _link(root)
    return root


def _link(root: _State) -> None:
    """Set each state's failure link, breadth first, and the stop string that ends there."""
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, child in state.follow.items():
            child.shorter = root if state.shorter is None else _step(state.shorter, character)
            child.stop = child.stop or child.shorter.stop
            queue.append(child)
