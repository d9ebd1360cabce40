"""A form after reasoning: during the reasoning only end tokens are forbidden; after it only the form is allowed."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from speculant.structured import Grammar, Grammars, ReasonedConstraint, Reasoning, StructuredOutputs
from speculant.text import Tokenizer
from tests import automata
from tests.models import END

START, STOP = 3, 4  # tokens that stand for the tags


@pytest.fixture
def grammar(grammars: Grammars) -> Grammar:
    return grammars.compile(StructuredOutputs(regex="(yes|no)!{2}")).result()


def allowed(mask: Tensor) -> set[int]:
    return {*automata.allowed(mask, 32 * len(mask))}


def text(tokenizer: Tokenizer, given: str) -> list[int]:
    return tokenizer.encode(given, add_special_tokens=False)


def test_the_form_begins_behind_the_reasoning(grammar: Grammar, tokenizer: Tokenizer) -> None:
    constraint = ReasonedConstraint(grammar, Reasoning(START, STOP, opened=True))
    first = allowed(grammar.constrain().mask(()))
    assert END not in allowed(constraint.mask(()))
    assert allowed(constraint.mask(())) >= set(range(256))
    constraint.advance(text(tokenizer, "hm"))
    assert not constraint.is_done
    assert constraint.forced() == []
    assert allowed(constraint.mask([7, STOP])) == first
    constraint.advance([7, STOP])
    assert allowed(constraint.mask(())) == first
    constraint.advance(text(tokenizer, "yes"))
    assert constraint.forced() == text(tokenizer, "!!")
    constraint.advance(text(tokenizer, "!!"))
    assert constraint.is_done


def test_the_first_token_may_decide(grammar: Grammar, tokenizer: Tokenizer) -> None:
    reasoning, first = Reasoning(START, STOP), allowed(grammar.constrain().mask(()))
    constraint = ReasonedConstraint(grammar, reasoning)
    assert allowed(constraint.mask(())) == first | {START}
    assert constraint.forced() == []
    constraint.advance(text(tokenizer, "n"))
    assert constraint.forced() == text(tokenizer, "o!!")
    constraint = ReasonedConstraint(grammar, reasoning)
    assert END not in allowed(constraint.mask([START]))
    assert allowed(constraint.mask([START, 9, STOP])) == first
    constraint.advance([START])
    assert START in allowed(constraint.mask(()))
    assert not constraint.is_done


@pytest.mark.parametrize("opened", [False, True])
def test_rollback_restores_the_state(grammar: Grammar, tokenizer: Tokenizer, opened: bool) -> None:
    """After random advances and rollbacks, masks equal those of a new constraint with the same tokens."""
    chance = random.Random(opened)
    whole = [START] * (not opened) + [50, 51, STOP] + text(tokenizer, "no!!") + [END]
    others = [*text(tokenizer, "yes!!"), END]
    for output in (whole, *([others] if not opened else [])):
        constraint, place = ReasonedConstraint(grammar, Reasoning(START, STOP, opened)), 0
        for _ in range(60):
            goal = chance.randrange(len(output) + 1)
            if goal < place:
                constraint.rollback(place - goal)
            else:
                constraint.advance(output[place:goal])
            place, fresh = goal, ReasonedConstraint(grammar, Reasoning(START, STOP, opened))
            fresh.advance(output[:place])
            for ahead in range(len(output) - place + 1):
                path = output[place : place + ahead]
                assert constraint.mask(path).equal(fresh.mask(path))
            assert (constraint.is_done, constraint.forced()) == (fresh.is_done, fresh.forced())
