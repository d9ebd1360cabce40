"""Copies of a text's earlier tokens, which go on after tokens that were changed."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, strategies as st

from speculant.drafting import AFTER, LEAST_COPY, PATIENCE, Copying, SuffixDrafter, SuffixOptions
from tests.models import make_request

FILE = list(range(100, 200))
START = FILE[:LEAST_COPY]


def drafted(output: list[int], limit: int = 4, prompt: list[int] = FILE, parts: int = 1) -> list[int]:
    """The draft after an output, of which each part of some tokens was drafted for."""
    drafter, request, tokens = SuffixDrafter(SuffixOptions()), make_request(prompt), list[int]()
    drafter.begin(request)
    for first in range(0, len(output), parts):
        request.extend(output[first : first + parts])
        tokens = drafter.propose([request], [limit])[0].token_list
    return tokens


def test_a_copy_drafts_as_many_tokens_as_are_wanted() -> None:
    assert drafted(START, 60) == FILE[LEAST_COPY : LEAST_COPY + 60]
    assert len(drafted(START[1:], 60)) < LEAST_COPY, "a shorter match begins none"
    assert drafted([*START, *START], 40, [1]) == [*START, *START, *START][:40], "it copies itself too"


D = FILE[LEAST_COPY:]  # what comes where the copies below depart
DEPARTURES: dict[str, tuple[list[int], list[int]]] = {
    "another token": ([7, D[1]], D[2:6]),
    "two other tokens": ([7, 8, D[2]], D[3:7]),
    "put in": ([7, 8, 9, D[0]], D[1:5]),
    "left out": ([D[20]], D[21:25]),
    "a single token decides only forwards": ([7, START[-1]], []),
    "two tokens decide backwards too": ([7, *START[-2:]], D[:4]),
    "a wrong place is left again": ([7, D[30], 8, D[0]], D[1:5]),
    "a second departure": ([7, *D[1:9], 8, D[10]], D[11:15]),
    "nothing known": ([7], []),
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", DEPARTURES)
def test_a_copy_is_found_again(name: str, parts: int) -> None:
    output, expected = DEPARTURES[name]
    whole = [*START, *output]
    assert drafted(whole[:LEAST_COPY]) == D[:4]
    drafter, request = SuffixDrafter(SuffixOptions()), make_request(FILE, whole[:LEAST_COPY])
    drafter.begin(request)
    found = drafter.propose([request], [4])[0].token_list
    for first in range(LEAST_COPY, len(whole), parts):
        request.extend(whole[first : first + parts])
        found = drafter.propose([request], [4])[0].token_list
    copying = drafter._readers[request.seq_id]._copying  # type: ignore[attr-defined]
    assert copying.ahead((), 4) == expected
    assert found == expected or not expected, "a copy comes before other continuations"


def test_a_copy_ends_after_many_changed_tokens() -> None:
    assert drafted([*START, *[7] * (PATIENCE - 1), D[1]])[:1] == D[2:3]
    far = [*FILE, *range(1000, 1000 + AFTER), 5, 6]
    drafter, request = SuffixDrafter(SuffixOptions()), make_request(far, START)
    drafter.begin(request)
    drafter.propose([request], [4])
    copying = drafter._readers[request.seq_id]._copying  # type: ignore[attr-defined]
    request.extend([7, 5])
    drafter.propose([request], [4])
    assert copying.ahead((), 1) == [], "the place is too far from the departure"
    request.extend([7] * PATIENCE)
    request.extend([D[1]])
    drafter.propose([request], [4])
    assert copying.ahead((), 1) == []


def test_an_edited_file_needs_few_drafts() -> None:
    """It took 26 passes with continuations of at most 12 tokens, which begin anew after each changed token."""
    edited = [*FILE[:30], 7, *FILE[31:60], 8, 9, *FILE[62:80], *FILE[85:]]
    drafter, request, passes = SuffixDrafter(SuffixOptions()), make_request([*FILE, 1], edited[:LEAST_COPY]), 0
    drafter.begin(request)
    while (place := request.num_output) < len(edited):
        tokens = drafter.propose([request], [32])[0].token_list
        accepted = next((n for n, pair in enumerate(zip(tokens, edited[place:], strict=False)) if pair[0] != pair[1]),
                        min(len(tokens), len(edited) - place))  # fmt: skip
        request.extend(edited[place : place + accepted + 1])
        passes += 1
    assert passes <= 14


def test_a_neighbour_that_fails_costs_a_copy_nothing() -> None:
    """The engine calls a drafter that failed for each sequence alone."""
    drafter, request, bad = SuffixDrafter(SuffixOptions()), make_request(FILE, START), make_request([2**70], seq_id=2)
    for each in (request, bad):
        drafter.begin(each)
    with pytest.raises(OverflowError):
        drafter.propose([request, bad], [2, 2])
    assert drafter.propose([request], [40])[0].token_list == D[:40]
    assert drafter._readers[request.seq_id]._copying.text.tolist() == request.tokens  # type: ignore[attr-defined]


small = st.lists(st.integers(0, 3), max_size=60)


@given(text=small, more=st.lists(small, max_size=4), ahead=st.lists(st.integers(0, 3), max_size=3))
def test_what_agrees_agrees(text: list[int], more: list[list[int]], ahead: list[int]) -> None:
    copying, whole = Copying(), [*text]
    copying.read(array("q", text))
    if text:
        copying.begin(min(3, len(text)))
    for part in more:
        copying.read(array("q", part))
        whole += part
        if copying.place is not None:
            run = min(copying.run, 16)
            assert 0 < copying.place < len(whole)
            assert whole[copying.place - run : copying.place] == whole[len(whole) - run :]
            assert len(copying.ahead((), 9)) == 9
            assert copying.ahead(ahead, 2) in ([], copying.ahead((), len(ahead) + 2)[len(ahead) :])
    assert copying.text.tolist() == whole
