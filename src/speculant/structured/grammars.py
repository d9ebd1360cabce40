"""Compiles the forms of requests: each distinct form once, and never in an engine's thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from speculant.errors import CapacityError, ConfigError, Converts, RequestError
from speculant.structured.constraint import SIMPLIFY, Grammar, shortened
from speculant.structured.spec import GrammarSource, StructuredOutputs
from speculant.structured.spelling import read_vocabulary
from speculant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CAPACITY = 64  # grammars to keep
MOST_WAITING = 1024  # callers; as many requests wait in an engine by default
COMPILERS = 2  # threads, so that one slow form does not delay all others
STACK_BYTES = 256 * 2**20  # the compiler recurses once per rule of a chain of rules
INSTALL = 'run: pip install -c constraints.txt "speculant[structured]"'
CORRECT = "correct it; docs/structured.md has the supported forms."


@dataclass(eq=False)
class _Compilation:
    """The compilation of one form, and the futures of its callers."""

    source: GrammarSource
    work: Future[Grammar]
    waiters: set[Future[Grammar]] = field(default_factory=set)


class Grammars:
    """Compiled grammars over one tokenizer, the most recently used ones.

    end_token_ids: the tokens that end a text; if the tokenizer has none of them, its own end token is used. capacity:
    compiled forms to keep. most_waiting: callers that may wait for forms at a time. Any thread may use it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: Collection[int],
        capacity: int = CAPACITY,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._tokenizer, self._ends = tokenizer, end_token_ids
        self._capacity, self._most_waiting = capacity, most_waiting
        self._known: OrderedDict[GrammarSource, _Compilation] = OrderedDict()
        self._num_waiting = 0
        self._lock = threading.Lock()  # never held while a form is compiled

    def compile(self, form: StructuredOutputs) -> Future[Grammar]:
        """Start to compile a form, unless it is known already. The caller may cancel the future.

        A compilation that has not begun is dropped when all of its callers have cancelled. Raises CapacityError if too
        many callers wait, and ConfigError without llguidance. The future of an invalid form raises RequestError.
        """
        _require_library()
        with self._lock:
            known = self._known.get(form.source)
            if known is not None and known.work.done():
                self._known.move_to_end(form.source)
                return known.work
            self._check_room()
            compilation = known or _Compilation(form.source, self._compiler.submit(self._compile, form.source))
            waiter = Future[Grammar]()
            compilation.waiters.add(waiter)
            self._num_waiting += 1
            self._known[form.source] = compilation
        waiter.add_done_callback(partial(self._leave, compilation))
        if known is None:  # outside the lock: if the work is done, this call delivers it
            compilation.work.add_done_callback(partial(self._deliver, compilation))
        return waiter

    def _check_room(self) -> None:
        if self._num_waiting >= self._most_waiting:
            raise CapacityError(
                f"{self._num_waiting} requests wait for the forms of their outputs to be compiled and max_waiting is "
                f"{self._most_waiting}",
                "try again later, or raise max_waiting.",
            )

    def _deliver(self, compilation: _Compilation, work: Future[Grammar]) -> None:
        """Pass a result on to its callers, and drop the least recently used forms beyond the capacity."""
        if work.cancelled():
            return
        with self._lock:
            waiters = list(compilation.waiters)
            done = [source for source, each in self._known.items() if each.work.done()]
            for source in done[: max(0, len(self._known) - self._capacity)]:
                del self._known[source]
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                if (error := work.exception()) is not None:
                    waiter.set_exception(error)
                else:
                    waiter.set_result(work.result())

    def _leave(self, compilation: _Compilation, waiter: Future[Grammar]) -> None:
        """Remove a caller that has the result or has cancelled. Without callers, cancel the compilation."""
        with self._lock:
            self._num_waiting -= 1
            compilation.waiters.discard(waiter)
            if not compilation.waiters and compilation.work.cancel():
                del self._known[compilation.source]

    @cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        """Threads with large stacks."""
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
        with Converts(ConfigError, "the package llguidance can't be loaded", INSTALL):
            from llguidance import LLMatcher

        tokens, ends = self._tokens
        with Converts(RequestError, f"the {source.kind} of structured_outputs can't be used", CORRECT):
            matcher = LLMatcher(tokens, _grammar_text(source), log_level=0, limits=_limits())
        _check(matcher, source)
        grammar = Grammar(matcher.deep_copy, tokens.vocab_size, ends, self._workers)
        first = Grammar(lambda: matcher, tokens.vocab_size, ends).constrain()
        if not bool(first.mask(()).any()):  # copies share what this one has computed
            raise RequestError(
                f"the {source.kind} of structured_outputs allows no text that this model's tokens can write", CORRECT
            )
        _check_beginning(grammar)
        return grammar

    @cached_property
    def _tokens(self) -> tuple[LLTokenizer, frozenset[int]]:
        """The library's form of the tokenizer, and its end tokens."""
        size, own = max(self._tokenizer.vocab().values()) + 1, self._tokenizer.eos_id
        ends = sorted(token for token in self._ends if token < size) or [token for token in (own,) if token is not None]
        if not ends:
            raise RequestError(
                "this checkpoint names no end token, which structured outputs need", "add it to its config.json."
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
    """Raise RequestError for a grammar that forces more bytes at the beginning than its limits allow."""
    constraint = grammar.constrain()
    if forced := constraint.forced():
        constraint.advance(forced[:1])
        constraint.mask(())  # forced bytes that use up the fuel of one step fail in the next one


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
    """Return limits under which compiling takes at most a second, and a mask some tens of milliseconds.

    The fuel that compiling leaves may be spent on bytes that are forced at the beginning: `(a{1000}){1000}` forces a
    million. Compiling the largest accepted texts takes 100,000.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=250_000, max_grammar_size=100_000, verbose_errors=False)


def _require_library() -> None:
    """Raise ConfigError without llguidance. It is not imported here: that would block a caller's event loop."""
    if find_spec("llguidance") is None:
        raise ConfigError("structured outputs need the package llguidance, which is not installed", INSTALL)
