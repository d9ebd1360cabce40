"""Banned words and allowed tokens as a constraint, compared with a direct implementation of the rules."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from speculant.constraints import Constraint
from speculant.errors import RequestError
from speculant.structured import JoinedConstraint, Vocabulary, banned_tokens, constrain_all
from tests import automata
from tests.automata import Automaton, ForcingAutomaton
from tests.timing import is_within

SIZE = 40
LETTERS = Automaton({0: {1: 1, 33: 0, 2: 0}, 1: {2: 0, 35: 1}})


def allowed(words: Sequence[Sequence[int]], tokens: Sequence[int] | None, output: Sequence[int]) -> list[int]:
    """Return the tokens that may follow an output: allowed ones that complete no banned word."""
    return [
        token
        for token in (range(SIZE) if tokens is None else sorted(set(tokens)))
        if not any(tuple([*output, token][-len(word) :]) == tuple(word) for word in words)
    ]


def masked(constraint: Constraint, drafted: Sequence[int] = ()) -> list[int]:
    return automata.allowed(constraint.mask(drafted), SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_masks_follow_words_and_allowed_tokens(seed: int) -> None:
    chance = random.Random(seed)
    words = [[chance.randrange(4) for _ in range(chance.randint(1, 4))] for _ in range(chance.randint(0, 6))]
    tokens = None if seed % 2 else [*chance.sample(range(SIZE), 9), 0, 1, 2, 3]
    constraint, output = Vocabulary(SIZE, words, tokens).constrain(), list[int]()
    for _ in range(60):
        if output and chance.random() < 0.3:
            undone = chance.randint(0, len(output))
            constraint.rollback(undone)
            del output[len(output) - undone :]
        drafted = [chance.randrange(4) for _ in range(chance.randint(0, 5))]
        assert masked(constraint, drafted) == allowed(words, tokens, [*output, *drafted])
        taken = [chance.randrange(4) for _ in range(chance.randint(1, 2))]
        constraint.advance(taken)
        output += taken
        assert not constraint.is_done


def test_without_a_word_in_sight_there_is_no_mask() -> None:
    constraint = Vocabulary(SIZE, [(1, 2)], None).constrain()
    assert constraint.mask(()) is None
    assert constraint.mask([1]) is not None
    assert constraint.mask([1, 0]) is None


def test_a_token_must_be_allowed_by_form_and_vocabulary() -> None:
    make = constrain_all(LETTERS.constrain, Vocabulary(SIZE, [(1, 35), (33,)], None))
    assert make is not None
    joined = make()
    assert isinstance(joined, JoinedConstraint)
    assert masked(joined) == [1, 2]
    assert masked(joined, [1]) == [2]
    joined.advance([1])
    assert masked(joined) == [2]
    joined.rollback(1)
    assert masked(joined) == [1, 2]
    assert not joined.is_done


def test_a_joined_form_ends_and_forces_as_alone() -> None:
    form, vocabulary = ForcingAutomaton({0: {3: 1}, 1: {}}), Vocabulary(SIZE, [], [3])
    joined = JoinedConstraint(form.constrain(), vocabulary.constrain())
    assert joined.forced() == [3]
    assert not joined.is_done
    joined.advance([3])
    assert joined.is_done


def test_a_single_constraint_is_not_joined() -> None:
    assert constrain_all(None, None) is None
    assert constrain_all(LETTERS.constrain, None) == LETTERS.constrain


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ({"cat": [1], " cat": [2]}, [[1], [2]]),
        ({"cat": [1], " cat": [3, 1]}, [[1]]),
        ({"cat": [1, 2], " cat": [1, 3]}, [[1, 2]]),
        ({"cat": [1, 2], " cat": [4, 2]}, [[1, 2], [4, 2]]),
    ],
)
def test_a_word_is_banned_with_and_without_a_space(tokens: dict[str, list[int]], expected: list[list[int]]) -> None:
    found = banned_tokens([" cat", (7, 8)], lambda text, special: tokens[text])
    assert found == (*expected, (7, 8))


def test_a_word_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="'cat', which the tokenizer encodes as no tokens"):
        banned_tokens(["cat"], lambda text, special: [5] if text == " cat" else [])


@pytest.mark.parametrize("length", [2, 10, 4096])
def test_masks_take_no_time_for_each_word(length: int) -> None:
    """As many words as a request may have, which begin as 128 outputs end: masks after each of 16 drafted tokens."""
    words = [[1] * (length - 1) + [2 + number] for number in range(min(1024, 16_384 // length))]
    constraints = [Vocabulary(150_000, words, [1, *range(2, 2000)]).constrain()] * 128
    for constraint in constraints[:1]:
        constraint.advance([1] * 5000)

    def masks() -> None:
        for constraint in constraints:
            for drafted in range(17):
                constraint.mask([1] * drafted)

    assert is_within(0.1, masks), "4.5 s if each word is compared"
