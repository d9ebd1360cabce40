"""Stop strings are found however the text is split, and no part of one is released."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speculant.errors import RequestError
from speculant.text.stream import Released, StopSearch, StopStrings
from tests.examples import examples
from tests.timing import cpu_seconds, is_within

stops_over_ab = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
pieces_over_ab = st.lists(st.text("abc", max_size=4), max_size=12)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search for the shortest beginning of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[list[str], str | None]:
    stop_checker = StopSearch(StopStrings(stops), include)
    results = [*(stop_checker.push(piece) for piece in pieces), stop_checker.flush()]
    return [result.text for result in results], results[-1].stop


@settings(deadline=None, max_examples=examples(400))
@given(stops=stops_over_ab, pieces=pieces_over_ab, include=st.booleans())
def test_any_split_of_the_text_agrees_with_the_oracle(stops: list[str], pieces: list[str], include: bool) -> None:
    shown, stop = run(stops, pieces, include)
    assert ("".join(shown), stop) == oracle("".join(pieces), stops, include)


@settings(deadline=None, max_examples=examples(300))
@given(stops=stops_over_ab, pieces=pieces_over_ab)
def test_only_possible_beginnings_of_a_stop_are_held_back(stops: list[str], pieces: list[str]) -> None:
    stop_checker, seen, shown = StopSearch(StopStrings(stops)), "", ""
    for piece in pieces:
        seen += piece
        result = stop_checker.push(piece)
        shown += result.text
        if result.stop is not None:
            break
        beginnings = (stop[:n] for stop in stops for n in range(1, len(stop)))
        assert len(seen) - len(shown) == max((len(b) for b in beginnings if seen.endswith(b)), default=0)


def test_a_stop_string_in_three_pieces_is_found() -> None:
    assert run(["</end>"], ["text</", "en", "d>more"]) == (["text", "", "", ""], "</end>")


def test_include_keeps_the_stop_string_and_drops_later_text() -> None:
    assert run(["END"], ["a E", "ND b"], include=True) == (["a ", "END", ""], "END")


def test_an_incomplete_stop_string_is_released() -> None:
    assert run(["aab"], ["aa", "aa", "c"]) == (["", "aa", "aac", ""], None)


def test_a_stop_inside_the_beginning_of_another_is_found() -> None:
    assert run(["abcd", "bc"], ["xab", "c", "d"]) == (["x", "a", "", ""], "bc")


def test_held_text_is_returned_at_the_end() -> None:
    assert run(["abc"], ["xab"]) == (["x", "ab"], None)


def test_no_text_follows_the_stop() -> None:
    stop_checker = StopSearch(StopStrings(["b"]))
    assert stop_checker.push("abc") == Released("a", "b")
    assert stop_checker.push("def") == Released("", "b")
    assert stop_checker.flush() == Released("", "b")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        StopStrings(["a", ""])


def test_time_is_linear_in_the_text() -> None:
    """The worst text for a naive search: it nearly completes the stop string at every character."""

    def search(length: int) -> Callable[[], None]:
        def push_all() -> None:
            stop_checker = StopSearch(StopStrings(["a" * 2000 + "b"]))
            for _ in range(length):
                stop_checker.push("a")

        return push_all

    assert is_within(12 * max(cpu_seconds(search(6_000)), 1e-3), search(24_000))
