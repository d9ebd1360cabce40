"""`TokenCounts`: counts that were updated token by token equal a fresh count."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, strategies as st

from speculant.counts import TokenCounts

tokens_strategy = st.lists(st.integers(0, 9), max_size=150)
moves_strategy = st.lists(st.one_of(st.lists(st.integers(0, 99), max_size=40), st.integers(1, 30)), max_size=12)


def counted(counts: TokenCounts, drafted: tuple[int, ...] = ()) -> dict[int, int]:
    """Return the counts by token; no token may be listed twice."""
    tokens, numbers = (each.tolist() for each in counts.with_drafted(drafted))
    assert len(set(tokens)) == len(tokens)
    return dict(zip(tokens, numbers, strict=True))


def expected(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {**dict.fromkeys(prompt, 0), **Counter(output)}


@given(prompt=tokens_strategy, output=tokens_strategy, moves=moves_strategy)
def test_counts_follow_added_and_removed_tokens(
    prompt: list[int], output: list[int], moves: list[list[int] | int]
) -> None:
    counts, output = TokenCounts(prompt, output), list(output)
    for move in moves:
        if isinstance(move, list):
            counts.add(move)
            output += move
        else:
            keep = max(0, len(output) - move)
            counts.remove(output[keep:])
            del output[keep:]
        assert counted(counts) == expected(prompt, output)
        assert counts.num_tokens == len(prompt) + len(output)
        assert counts == TokenCounts(prompt, output)
    assert counts != TokenCounts(prompt, [*output, 1])


@given(prompt=tokens_strategy, output=tokens_strategy, drafted=st.lists(st.integers(0, 12), max_size=8))
def test_counts_with_drafted_leave_the_counts_alone(prompt: list[int], output: list[int], drafted: list[int]) -> None:
    counts = TokenCounts(prompt, output)
    assert counted(counts, tuple(drafted)) == expected(prompt, [*output, *drafted])
    assert counted(counts) == expected(prompt, output)
