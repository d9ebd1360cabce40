"""The progress bar over prompts: where it is shown, how it is made, and that it counts prompts."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from speculant.engine import progress
from speculant.errors import ConfigError


class Bar:
    """Replaces tqdm and records the calls."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.count, self.closed = arguments, 0, False

    def update(self, n: int) -> None:
        """Count."""
        self.count += n

    def close(self) -> None:
        """End."""
        self.closed = True


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """See the base."""
        return True


def fail_after(n: int, count: Callable[[], object]) -> None:
    """Count n times and fail."""
    for _ in range(n):
        count()
    raise KeyError


def test_a_callable_makes_the_bar_wherever_it_is_shown() -> None:
    bars: list[Bar] = []

    def make(**arguments: Any) -> Bar:
        bars.append(Bar(**arguments))
        return bars[-1]

    with pytest.raises(KeyError), progress(make, 3) as count:
        fail_after(2, count)
    (bar,) = bars
    assert (bar.arguments["total"], bar.count, bar.closed) == (3, 2, True)


@pytest.mark.parametrize(
    ("wanted", "terminal", "shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_is_shown_on_terminals(
    monkeypatch: pytest.MonkeyPatch, wanted: bool, terminal: bool, shown: bool
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(wanted, 2) as count:
        count()
    assert ("Processed prompts" in stream.getvalue()) == shown


def test_without_standard_error_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress(True, 2) as count:
        count()


def test_tools_in_its_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_tqdm is a list"), progress([{}], 1):  # type: ignore[arg-type]
        pass
