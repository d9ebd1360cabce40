"""Lines of a hole end where they are too little indented, however the text was divided."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from speculant.serving import IndentedLines


def taken(pieces: list[str], least: int) -> str:
    lines = IndentedLines(least)
    return "".join(map(lines.push, pieces)) + lines.flush()


@pytest.mark.parametrize(
    ("text", "least", "kept"),
    [
        ("a\nb", 0, "a\nb"),
        ("a\nb", 1, "a"),
        ("  a\n\tb\n  c\nd\n   e", 1, "  a\n\tb\n  c"),
        ("a\n\n    b\n  c", 4, "a\n\n    b"),
        ("a\n\n \nb", 1, "a"),
        ("a\n  ", 4, "a\n  "),
        ("\n\n", 2, "\n\n"),
    ],
)  # fmt: skip
def test_a_line_with_too_few_blanks_ends_the_text(text: str, least: int, kept: str) -> None:
    assert taken([text], least) == kept
    assert taken([*text], least) == kept


@given(st.lists(st.text("a \t\n", max_size=4), max_size=12), st.integers(0, 3))
def test_lines_are_the_same_in_any_pieces(pieces: list[str], least: int) -> None:
    text = "".join(pieces)
    assert taken(pieces, least) == taken([text], least)
    assert text.startswith(taken(pieces, least))


def test_blank_lines_take_linear_time() -> None:
    """They come token by token, and are held back until text follows."""
    lines = IndentedLines(1)
    started = time.process_time()
    assert "".join(lines.push("\n") for _ in range(50_000)) + lines.push("a") == ""
    assert lines.is_over
    assert time.process_time() - started < 2
