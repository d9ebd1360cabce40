"""Compiles the forms that requests ask for: each distinct one once, and never in an engine's thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from speculant.errors import ConfigError, Converts, RequestError
from speculant.structured.constraint import SIMPLIFY, Grammar, shortened
from speculant.structured.spec import GrammarSource, StructuredOutputs
from speculant.structured.vocabulary import read_vocabulary
from speculant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CAPACITY = 64  # grammars that are kept
COMPILERS = 2  # threads, so that a form that takes long is not in the way of all others
STACK_BYTES = 256 * 2**20  # the compiler recurses once per rule of a chain of rules
CORRECT = "correct it; docs/structured.md says what is supported."


class Grammars:
    """Compiled grammars over one tokenizer, the most recently used ones.

    end_token_ids: the tokens that end a text; if the tokenizer has none of them, its own end token does. Any thread may
    use it.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int], capacity: int = CAPACITY) -> None:
        self._tokenizer, self._ends, self._capacity = tokenizer, end_token_ids, capacity
        self._known: OrderedDict[GrammarSource, Future[Grammar]] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, form: StructuredOutputs) -> Future[Grammar]:
        """Have a form compiled, unless it is or was already; the caller need not wait.

        The result is an error for a form that can't be used: RequestError, or ConfigError without llguidance.
        """
        _require_library()
        with self._lock:
            future = self._known.get(form.source)
            if future is None:
                future = self._known[form.source] = self._compiler.submit(self._compile, form.source)
            self._known.move_to_end(form.source)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return future

    @cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        """Threads whose stacks are large."""
        pool, all_there = ThreadPoolExecutor(COMPILERS, "speculant-grammars"), threading.Barrier(COMPILERS)
        before = threading.stack_size(STACK_BYTES)
        try:
            list(pool.map(lambda _: all_there.wait(), range(COMPILERS)))
        finally:
            threading.stack_size(before)
        return pool

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "speculant-masks")

    def _compile(self, source: GrammarSource) -> Grammar:
        from llguidance import LLMatcher

        tokens, ends = self._tokens
        with Converts(RequestError, f"the {source.kind} of structured_outputs can't be used", CORRECT):
            matcher = LLMatcher(tokens, _grammar_text(source), log_level=0, limits=_limits())
        _check(matcher, source)
        grammar = Grammar(matcher.deep_copy, tokens.vocab_size, ends, self._workers)
        first = Grammar(lambda: matcher, tokens.vocab_size, ends).constrain()
        if not bool(first.mask(()).any()):  # copies begin with what this has computed
            raise RequestError(
                f"the {source.kind} of structured_outputs allows no text of this model's tokens", CORRECT
            )
        _check_beginning(grammar)
        return grammar

    @cached_property
    def _tokens(self) -> tuple[LLTokenizer, frozenset[int]]:
        """The library's form of the tokenizer, and the end tokens that it has."""
        size, own = max(self._tokenizer.vocab().values()) + 1, self._tokenizer.eos_id
        ends = sorted(token for token in self._ends if token < size) or [token for token in (own,) if token is not None]
        if not ends:
            raise RequestError(
                "this checkpoint names no end token, which structured outputs end with", "add it to its config.json."
            )
        with Converts(RequestError, "structured outputs don't work with this tokenizer", "use another checkpoint."):
            return read_vocabulary(self._tokenizer, size, ends), frozenset(ends)


def _check(matcher: LLMatcher, source: GrammarSource) -> None:
    """Raise RequestError for a grammar that was not accepted."""
    if matcher.is_error():
        reason = shortened(matcher.get_error())
        fix = SIMPLIFY if "too" in reason or "limit" in reason else CORRECT
        raise RequestError(f"the {source.kind} of structured_outputs can't be used: {reason}", fix)


def _check_beginning(grammar: Grammar) -> None:
    """Raise RequestError for a grammar whose texts begin with more forced bytes than its limits allow."""
    constraint = grammar.constrain()
    if forced := constraint.forced():
        constraint.advance(forced[:1])
        constraint.mask(())  # a run that has used up the fuel of one step fails in the next one


def _grammar_text(source: GrammarSource) -> str:
    """Return a source as a grammar of the library."""
    from llguidance import LLMatcher, grammar_from

    if source.kind == "json":
        return LLMatcher.grammar_from_json_schema(source.text, defaults={"whitespace_flexible": not source.compact})
    if source.kind == "choice":
        return grammar_from("choice", source.text)
    return (
        LLMatcher.grammar_from_regex(source.text)
        if source.kind == "regex"
        else LLMatcher.grammar_from_lark(source.text)
    )


def _limits() -> LLParserLimits:
    """Return limits by which compiling ends within a second, and a mask within some tens of milliseconds.

    What compiling leaves of its fuel may be spent on the bytes that a text has to begin with: `(a{1000}){1000}` forces
    a million. The largest texts that are accepted need 100,000 to be compiled.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=250_000, max_grammar_size=100_000, verbose_errors=False)


def _require_library() -> None:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError(
            "structured outputs need the package llguidance, which is not installed",
            'run: pip install -c constraints.txt "speculant[structured]"',
        ) from None
