"""A grammar's constraint: its masks depend only on the tokens, not on drafts, rollbacks or prepared masks."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor

from speculant.constraints import Constraint
from speculant.errors import RequestError
from speculant.structured import Grammar, GrammarConstraint, Grammars, ReasonedConstraint, Reasoning, StructuredOutputs
from speculant.text import Tokenizer
from tests import automata
from tests.examples import examples
from tests.models import END, VOCAB_SIZE

CHOICES = ["cat", "catalogue", "dog", "do", "Ångström", "日本", "日曜"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "n": {"type": "array", "items": {"enum": [1, 23]}}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=SCHEMA),
    "compact": StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    "regex": StructuredOutputs(regex="[a-c]{2,4}(-[0-9]+x)?"),
    "choice": StructuredOutputs(choice=CHOICES),
    "grammar": StructuredOutputs(grammar='start: "<" item* ">"\nitem: "x" | "(" item ")"'),
}


def allowed(mask: Tensor | None) -> set[int]:
    return {*automata.allowed(mask, VOCAB_SIZE)}


def test_masks_allow_exactly_the_choices(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The oracle: a byte is allowed if some choice continues with it, and the end token after a whole choice."""
    texts = [tuple(tokenizer.encode(choice)) for choice in CHOICES]
    constraint = grammars.compile(FORMS["choice"]).result().constrain()
    for length in range(max(map(len, texts)) + 1):
        for begun in {text[:length] for text in texts if len(text) >= length}:
            following = {text[length] for text in texts if text[:length] == begun and len(text) > length}
            assert allowed(constraint.mask(begun)) == following | ({END} if begun in texts else set())


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "<" item* ">"\nitem ::= "x"\n  | "(" item ")"',
        '# as llama.cpp writes it\nroot ::= "\\u003c" one-item* [\\x3e]\none-item ::= ("x" | "(" one-item ")")\n',
    ],
)
def test_ebnf_allows_what_the_same_grammar_in_lark_allows(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    constraints = [
        grammars.compile(form).result().constrain() for form in (FORMS["grammar"], StructuredOutputs(grammar=text))
    ]
    for begun in ("", "<", "<x", "<(", "<((x)", "<x>"):
        lark, ebnf = (allowed(each.mask(tuple(tokenizer.encode(begun)))) for each in constraints)
        assert lark == ebnf != set()


SUM = 'start: item ("+" item)*\nitem: "(" start ")" | /[0-9]/'
RECURSIVE: dict[str, tuple[str, StructuredOutputs]] = {  # a grammar, and the same form in other words
    "right": ('root ::= "<" texts\ntexts ::= [^>] texts | ">"', StructuredOutputs(regex="<(?s:[^>])*>")),
    "left": ('root ::= texts ">"\ntexts ::= texts [^>] | "<"', StructuredOutputs(regex="<(?s:[^>])*>")),
    "both": ('root ::= "<" a a ">"\na ::= "x" a | a "y" | a "," a | a | "b"', StructuredOutputs(
        regex="<x*by*(,x*by*)*x*by*(,x*by*)*>")),
    "twice": ('root ::= a "."\na ::= a a | [a-c] | ""', StructuredOutputs(regex="[a-c]*[.]")),
    "groups": ('root ::= "[" list "]"\nlist ::= [a-c] ("," list | "") | list?', StructuredOutputs(
        regex=r"\[([a-c],)*[a-c]?\]")),
    "what follows": ('root ::= word "x"\nword ::= [a-z] word?', StructuredOutputs(regex="[a-z]+x")),
    "within": ('root ::= root "+" root | "(" root ")" | [0-9]', StructuredOutputs(grammar=SUM)),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURSIVE)
def test_a_recursive_rule_allows_what_a_repetition_allows(grammars: Grammars, name: str) -> None:
    text, same = RECURSIVE[name]
    for seed in range(examples(4, least=2)):
        rng, forms = random.Random(seed), (StructuredOutputs(grammar=text), same)
        constraints = [grammars.compile(form).result().constrain() for form in forms]
        for _ in range(40):
            one, other = (allowed(each.mask(())) for each in constraints)
            assert one == other != set()
            if not (known := sorted(one - {END})):
                break
            token = rng.choice(known)
            for each in constraints:
                each.advance([token])


@pytest.mark.parametrize("rule", ["[^>] texts", "texts [^>]", "[^>] texts?", "(texts | [^>]) texts"])
def test_a_long_text_of_a_recursive_rule_is_within_the_limits(
    grammars: Grammars, tokenizer: Tokenizer, rule: str
) -> None:
    form = StructuredOutputs(grammar=f'root ::= "<" texts ">"\ntexts ::= {rule} | ""')
    constraint, tokens = grammars.compile(form).result().constrain(), tokenizer.encode("a b" * 800)
    constraint.advance(tokenizer.encode("<"))
    constraint.advance(tokens)
    assert allowed(constraint.mask(())) > set(tokens)


@pytest.mark.parametrize(
    "form", [pytest.param(each, marks=pytest.mark.slow if each == "compact" else []) for each in FORMS]
)
def test_masks_depend_on_the_tokens_alone(grammars: Grammars, form: str) -> None:
    """After random advances, drafts and rollbacks, masks equal those of a new constraint with the same tokens."""
    grammar, rng = grammars.compile(FORMS[form]).result(), random.Random(form)
    for _ in range(examples(4, least=1)):
        constraint, taken = grammar.constrain(), list[int]()
        while len(taken) < 24 and not constraint.is_done:
            draft = wander(constraint, rng)
            if rng.random() < 0.5:
                constraint.mask_s = 1.0  # long enough to be handed over
                constraint.prepare([draft[:end] for end in range(len(draft) + 1)])
            if rng.random() < 0.3:
                constraint.forced()
            masks = [allowed(constraint.mask(draft[:end])) for end in rng.sample(range(len(draft) + 1), len(draft) + 1)]
            fresh = grammar.constrain()
            fresh.advance(taken)
            assert sorted(masks, key=sorted) == sorted(
                (allowed(fresh.mask(draft[:end])) for end in range(len(draft) + 1)), key=sorted
            )
            assert constraint.is_done == fresh.is_done
            assert constraint.forced() == fresh.forced()
            token = rng.choice(sorted(allowed(constraint.mask(()))))
            constraint.advance([token])
            taken.append(token)
            if rng.random() < 0.25:
                count = rng.randint(1, len(taken))
                constraint.rollback(count)
                del taken[len(taken) - count :]


def wander(constraint: Constraint, rng: random.Random) -> list[int]:
    """Return a draft, most of whose tokens are allowed."""
    draft: list[int] = []
    for _ in range(rng.randrange(5)):
        known = sorted(allowed(constraint.mask(draft)))
        draft.append(rng.choice(known) if known and rng.random() < 0.8 else rng.randrange(VOCAB_SIZE))
    return draft


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_are_the_only_ones_allowed(grammars: Grammars, form: str) -> None:
    constraint, rng = grammars.compile(FORMS[form]).result().constrain(), random.Random(1)
    for _ in range(40):
        if constraint.is_done:
            break
        forced = constraint.forced()
        for place, token in enumerate(forced):
            assert allowed(constraint.mask(forced[:place])) == {token}
        if len(allowed(constraint.mask(()))) > 1:
            assert not forced
        constraint.advance([rng.choice(sorted(allowed(constraint.mask(()))))])


def test_compact_json_forces_its_fixed_parts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.compile(FORMS["compact"]).result().constrain()
    assert tokenizer.decode(constraint.forced()) == '{"name":"'
    constraint.advance(tokenizer.encode('{"name":"ab"'))
    assert tokenizer.decode(constraint.forced()) == ',"n":['


def test_no_token_follows_a_forbidden_one_or_the_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    cat = tokenizer.encode("cat")
    constraint = grammars.compile(FORMS["choice"]).result().constrain()
    for draft in ([0], [*cat[:2], 0, 1], [*cat, END], [*cat, END, END], [END], [VOCAB_SIZE - 1], [END + 1]):
        assert not constraint.mask(draft).any()
    constraint.advance([*cat, END])
    assert constraint.is_done
    assert not constraint.mask(()).any()
    constraint.rollback(1)
    assert not constraint.is_done
    assert allowed(constraint.mask(())) == {END, *tokenizer.encode("a")}


@pytest.mark.parametrize("text", ["", "no", "yes"])
def test_an_end_token_is_advanced_and_rolled_back(grammars: Grammars, tokenizer: Tokenizer, text: str) -> None:
    constraint = grammars.compile(StructuredOutputs(choice=["", "no", "not", "yes"])).result().constrain()
    tokens = tokenizer.encode(text)
    constraint.advance(tokens)
    before, done = constraint.mask(()).clone(), constraint.is_done
    constraint.mask([END])
    constraint.advance([END])
    assert constraint.is_done
    assert not constraint.mask(()).any()
    assert not constraint.mask([END]).any()
    assert not constraint.forced()
    constraint.rollback(0)
    assert constraint.is_done
    constraint.rollback(1)
    assert constraint.is_done == done
    assert torch.equal(constraint.mask(()), before)
    constraint.advance([END])
    constraint.rollback(1 + len(tokens))
    assert allowed(constraint.mask(())) == {END, *tokenizer.encode("ny")}


def test_a_constraint_is_done_when_only_the_end_may_follow(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for choice, done in {"cat": False, "catalogue": True, "dog": True, "do": False}.items():
        constraint = grammars.compile(FORMS["choice"]).result().constrain()
        constraint.advance(tokenizer.encode(choice))
        assert constraint.is_done == done


def test_a_forbidden_token_is_not_advanced(grammars: Grammars) -> None:
    constraint = grammars.compile(FORMS["choice"]).result().constrain()
    with pytest.raises(RequestError, match="forbids the tokens"):
        constraint.advance([0])
    assert constraint.mask(()).any()


# A grammar whose second branch exceeds the limits of this test, and whose first branch does not.
LIMITED = StructuredOutputs(grammar='start: "a" | "b" tail\ntail: "x" tail "y" | "x" tail "z" | "x" "w"')


def limited(grammars: Grammars, **limits: int) -> Grammar:
    grammar = grammars.compile(LIMITED).result()
    tokens, _ = grammars._tokens
    bounds = LLParserLimits(**(limits or {"max_items_in_row": 5}), verbose_errors=False)
    matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(LIMITED.source.text), log_level=0, limits=bounds)
    return replace(grammar, begin=matcher.deep_copy)


def test_a_draft_over_the_limits_is_the_only_loss(grammars: Grammars, tokenizer: Tokenizer) -> None:
    a, b, x = (tokenizer.encode(each)[0] for each in "abx")
    constraint = limited(grammars).constrain()
    assert not constraint.mask([b, x, x]).any()
    assert allowed(constraint.mask(())) == {a, b}
    constraint.mask_s = 1.0
    constraint.prepare([[], [b, x, x], [a]])
    assert allowed(constraint.mask([a])) == {END}
    constraint.advance([a])
    assert constraint.is_done


def test_a_text_over_the_limits_is_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = limited(grammars).constrain()
    with pytest.raises(RequestError, match="exceeds its limits: .*max is 5"):
        constraint.advance(tokenizer.encode("bxxx"))
    with pytest.raises(RequestError, match="exceeds its limits: .*limit 1"):
        limited(grammars, step_max_items=1).constrain().mask(())
    constraint, text = limited(grammars, step_max_items=7).constrain(), tokenizer.encode("bx")
    assert constraint.mask(()).any()
    assert not constraint.mask(text).any()  # of a draft, and no error
    constraint.advance(text)
    with pytest.raises(RequestError, match="exceeds its limits: .*limit 7"):
        constraint.mask(())


def test_masks_are_prepared_in_another_thread(grammars: Grammars) -> None:
    used: list[Sequence[int]] = []

    class Watched(GrammarConstraint):
        def _compute(self, path: tuple[int, ...]) -> Tensor:
            used.append(path)
            return super()._compute(path)

    with ThreadPoolExecutor(1) as pool:
        constraint = Watched(replace(grammars.compile(FORMS["choice"]).result(), workers=pool))
        constraint.prepare([[], [1]])
        pool.submit(int).result()
        assert not used  # no mask is known to be slow yet
        constraint.mask_s = 1.0
        constraint.prepare([[], [1]])
        pool.submit(int).result()
        assert used == [(), (1,)]
        assert constraint.mask(()).any()
        assert len(used) == 2
        held = threading.Event()
        pool.submit(held.wait)
        constraint.prepare([[2]])
        assert not constraint.mask([2]).any()  # it has not begun, and is computed here
        held.set()
    assert used == [(), (1,), (2,)]


# --- a form after reasoning: during the reasoning only end tokens are forbidden; after it only the form is allowed


START, STOP = 3, 4  # tokens that stand for the tags


@pytest.fixture
def grammar(grammars: Grammars) -> Grammar:
    return grammars.compile(StructuredOutputs(regex="(yes|no)!{2}")).result()


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
