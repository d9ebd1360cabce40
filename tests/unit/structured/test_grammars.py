"""Forms are compiled once, in other threads and within bounds; errors of a form are reported at once."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest

from speculant.errors import CapacityError, ConfigError, RequestError
from speculant.structured import Grammar, GrammarConstraint, Grammars, GrammarSource, StructuredOutputs
from speculant.text import Tokenizer
from tests.automata import allowed
from tests.models import END

WORD = StructuredOutputs(regex="[a-z]+")


def test_a_form_is_compiled_once(grammars: Grammars) -> None:
    first = grammars.compile(WORD)
    assert grammars.compile(replace(WORD)).result() is first.result()
    assert grammars.compile(StructuredOutputs(regex="[a-z]+?")).result() is not first.result()


def test_the_least_recent_grammar_is_dropped(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, {END}, capacity=2)
    forms = [StructuredOutputs(regex=text) for text in "abc"]
    first, second = (grammars.compile(form).result() for form in forms[:2])
    assert grammars.compile(forms[0]).result() is first
    grammars.compile(forms[2]).result()
    assert grammars.compile(forms[0]).result() is first
    assert grammars.compile(forms[1]).result() is not second


INVALID = {
    "unclosed group": StructuredOutputs(regex="(a"),
    "look-around": StructuredOutputs(regex="a(?=b)"),
    'unknown name: "item"': StructuredOutputs(grammar="start: item"),
    "Rule 'item' not found": StructuredOutputs(grammar="root ::= item"),
    "No 'root' rule found": StructuredOutputs(grammar='start ::= "a"'),
    "Empty grammar": StructuredOutputs(grammar=""),
    "minLength .5. is greater": StructuredOutputs(json={"type": "string", "minLength": 5, "maxLength": 2}),
    "too deeply nested": StructuredOutputs(grammar="start: " + "(" * 3000 + '"a"' + ")" * 3000),
}


@pytest.mark.parametrize("reason", INVALID, ids=str)
def test_an_error_explains_why_a_form_is_invalid(grammars: Grammars, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grammars.compile(INVALID[reason]).result()
    assert len(str(caught.value)) < 600
    assert "0x" not in str(caught.value)


def rules(count: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}:"x"r{i + 1}|"y"' for i in range(count)) + f'\nr{count}: "z"'


def schemas(count: int) -> dict[str, object]:
    inner = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**inner, f"d{count}": {"type": "string"}}}


LARGE = {
    "rules": StructuredOutputs(grammar=rules(3500)),
    "definitions": StructuredOutputs(json=schemas(1100)),
    "properties": StructuredOutputs(json={"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    "alternatives": StructuredOutputs(regex="|".join(f"w{i}" for i in range(8000))),
    "repetitions": StructuredOutputs(regex="((a{1,1000}){1,1000}b{1,1000}){1,1000}"),
    "choices": StructuredOutputs(choice=[f"choice {i}" for i in range(1024)]),
}


RUNS = {
    "regex": StructuredOutputs(regex="(((a{1000}){1000}){1000})"),
    "deeper": StructuredOutputs(regex="((((((a{100}){100}){100}){100}){100}){100})"),
    "flat": StructuredOutputs(regex="a{1000000000}"),
    "pattern": StructuredOutputs(json={"type": "string", "pattern": "^(((ab){1000}){1000}){1000}$"}),
    "grammar": StructuredOutputs(grammar="start: T{1000}\nT: U{1000}\nU: /a{1000}/"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "regex" else pytest.mark.slow) for each in RUNS]
)
def test_an_endless_run_is_refused_at_once(grammars: Grammars, name: str) -> None:
    """What these texts begin with is forced for a million bytes or more."""
    started = time.process_time()
    with pytest.raises(RequestError, match="exceeds its limits"):
        grammars.compile(RUNS[name]).result(timeout=20)
    assert time.process_time() - started < 2


def follow(constraint: GrammarConstraint, count: int) -> None:
    """Advance by the forced tokens, one at a time."""
    for _ in range(count):
        constraint.mask(())
        constraint.advance(constraint.forced()[:1])


def test_an_endless_run_may_begin_later(grammars: Grammars) -> None:
    """Its request fails, and no step takes long."""
    constraint = grammars.compile(StructuredOutputs(regex="x|b(((a{1000}){1000}){1000})")).result().constrain()
    constraint.advance([grammars._tokenizer.encode("b")[0]])
    started = time.process_time()
    with pytest.raises(RequestError, match="exceeds its limits"):
        follow(constraint, 100)
    assert time.process_time() - started < 1


def test_a_slow_form_delays_no_other(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, compile_one = threading.Event(), grammars._compile

    def slowly(source: GrammarSource) -> Grammar:
        if source.text == "slow":
            leave.wait(20)
        return compile_one(source)

    monkeypatch.setattr(grammars, "_compile", slowly)
    slow = grammars.compile(StructuredOutputs(regex="slow"))
    assert grammars.compile(StructuredOutputs(regex="fast")).result(timeout=10)
    assert not slow.done()
    leave.set()
    assert slow.result(timeout=10)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each != "properties" else pytest.mark.slow) for each in LARGE]
)
def test_a_large_form_ends_within_seconds(grammars: Grammars, name: str) -> None:
    """The compiler recurses along chains of rules, on a stack that is large enough for the longest texts."""
    started = time.process_time()
    constraint = grammars.compile(LARGE[name]).result(timeout=60).constrain()
    assert constraint.mask(()).any()
    assert time.process_time() - started < 5


def test_compiling_does_not_change_thread_stacks(grammars: Grammars) -> None:
    grammars.compile(WORD).result()
    assert threading.stack_size() == 0


def test_a_missing_library_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"speculant\[structured\]"):
        Grammars(tokenizer, {END}).compile(WORD)


def test_end_tokens_are_the_engines_or_the_tokenizers(tokenizer: Tokenizer) -> None:
    for ends, expected in (({END}, {END}), ({7, END, 9999}, {7, END}), ((), {END})):
        constraint = Grammars(tokenizer, ends).compile(StructuredOutputs(choice=[""])).result().constrain()
        assert {*allowed(constraint.mask(()), tokenizer.vocab_size)} == expected


def test_a_checkpoint_without_end_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no end token"):
        Grammars(Tokenizer(tokenizer.backend, {}), ()).compile(WORD).result()


class Watched:
    """Grammars whose compilations wait until `go` is set. begun: the texts of the compilations that have begun."""

    def __init__(self, tokenizer: Tokenizer, **limits: int) -> None:
        self.grammars = Grammars(tokenizer, {END}, **limits)
        self.go, self.begun, self._compile = threading.Event(), list[str](), self.grammars._compile
        self.grammars._compile = self.compile  # type: ignore[method-assign]

    def compile(self, source: GrammarSource) -> Grammar:
        self.begun.append(source.text)
        assert self.go.wait(20)
        return self._compile(source)

    def ask(self, *texts: str) -> list[Future[Grammar]]:
        return [self.grammars.compile(StructuredOutputs(regex=text)) for text in texts]

    def finish(self, *futures: Future[Grammar]) -> None:
        """Let all compilations run, and wait for these."""
        self.go.set()
        assert all(future.result(timeout=20) for future in futures)


def test_cancelled_compilations_never_begin(tokenizer: Tokenizer) -> None:
    """Two are running; 500 more are queued and cancelled, so the next one begins at once."""
    watched = Watched(tokenizer)
    under_way = watched.ask("first", "second")
    assert all(future.cancel() for future in watched.ask(*(f"x{number}" for number in range(500))))
    watched.finish(*under_way, *watched.ask("next"))
    assert watched.begun[2:] == ["next"]


def test_compilation_continues_for_the_other_callers(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    *busy, one, other = watched.ask("first", "second", "shared", "shared")
    assert one.cancel()
    assert not other.cancelled()
    watched.finish(other, *busy)
    assert watched.begun.count("shared") == 1


def test_a_dropped_form_can_be_compiled_again(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    *busy, dropped = watched.ask("first", "second", "again")
    assert dropped.cancel()
    watched.finish(*busy, *watched.ask("again"))


def test_waiting_callers_are_bounded(tokenizer: Tokenizer) -> None:
    """Each caller counts, also for the same form, until it has the result or has cancelled."""
    watched = Watched(tokenizer, most_waiting=3)
    waiting = watched.ask("a", "a", "b")
    with pytest.raises(CapacityError, match=r"(?s)3 requests wait.*max_waiting is 3.*Fix: try again later"):
        watched.ask("c")
    assert waiting.pop().cancel()
    watched.finish(*waiting, *watched.ask("d"))
    for text in "efgh":
        watched.finish(*watched.ask(text))


def test_a_form_with_callers_is_kept_beyond_the_capacity(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer, capacity=2)
    texts = [f"x{number}" for number in range(9)]
    watched.finish(*watched.ask(*texts))
    assert sorted(watched.begun) == texts, "each was compiled once"
    assert len(watched.grammars._known) == 2
