"""The part of an answer in which a model reasons, `<think>...</think>`, told from the rest while both are generated."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from speculant.serving.tools.base import SPACE, TextDelta
from speculant.text.reasoning import find_tags, is_opened

_SPACE = frozenset(SPACE)


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


Delta = ReasoningDelta | TextDelta


class ReasoningParser:
    """Splits an answer at the end of its reasoning, which can only be its beginning.

    White space beside the tags is left out. Time is linear in the text, and its cuts do not matter.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", opened: bool = False) -> None:
        """`opened`: the prompt ends with the start tag, so that the answer begins within the reasoning."""
        self.start, self.end, self._opened = start, end, opened
        self._made: list[Delta] = []
        self._char = ""  # to be read next; "" = the end of the text
        self._script = self._read()
        next(self._script)

    def feed(self, text: str) -> list[Delta]:
        """Return what has become certain with more text; only what may be a tag's beginning is held back."""
        for char in text:
            self._script.send(char)
        return self._fetch()

    def finish(self) -> list[Delta]:
        """Return the rest at the text's end; `feed` may not follow. Reasoning that was not ended stays reasoning."""
        with suppress(StopIteration):
            self._script.send("")
        return self._fetch()

    def _fetch(self) -> list[Delta]:
        made, self._made = self._made, []
        return [kind("".join(each.text for each in group)) for kind, group in groupby(made, type)]

    def _read(self) -> Generator[None, str, None]:
        self._char = yield
        if self._opened or (yield from self._opens()):
            yield from self._skip_space()
            yield from self._reason()
            yield from self._skip_space()
        while self._char:
            self._made.append(TextDelta(self._char))
            self._char = yield

    def _opens(self) -> Generator[None, str, bool]:
        """Read the start tag; what is none is text."""
        held = yield from self._skip_space()
        for expected in self.start:
            if self._char != expected:
                self._made += [TextDelta(held)] if held else []
                return False
            held += expected
            self._char = yield
        return True

    def _skip_space(self) -> Generator[None, str, str]:
        skipped: list[str] = []
        while self._char in _SPACE:
            skipped.append(self._char)
            self._char = yield
        return "".join(skipped)

    def _reason(self) -> Generator[None, str, None]:
        """Read the reasoning and the end tag."""
        space: list[str] = []
        held = ""  # the beginning of an end tag, perhaps
        while self._char:
            held += self._char
            while not self.end.startswith(held):
                space.append(held[0])
                if held[0] not in _SPACE:
                    self._release(space)
                held = held[1:]
            self._char = yield
            if held == self.end:
                return
        self._release([*space, held])

    def _release(self, pieces: list[str]) -> None:
        if text := "".join(pieces):
            self._made.append(ReasoningDelta(text))
        pieces.clear()


def find_reasoning(template: str | None, prompt: str = "") -> ReasoningParser | None:
    """Return a parser for one answer if a chat template knows reasoning; `prompt` is what it rendered.

    Some templates end the prompt with the start tag; the answer begins within the reasoning then.
    """
    tags = find_tags(template)
    return None if tags is None else ReasoningParser(*tags, opened=is_opened(tags, prompt))
