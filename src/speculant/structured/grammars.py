"""Compiles the forms of requests: each distinct form once, never in an engine's thread, and clients in turn."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from speculant.errors import CapacityError, ConfigError, Converts, RequestError
from speculant.structured.constraint import SIMPLIFY, Grammar
from speculant.structured.lanes import CLIENT_SHARE, REFUSED_S, SLOW_S, Allowance, ClientLane, ClientTime
from speculant.structured.library import (
    STRANGERS,
    StepLimits,
    has_no_text,
    is_of_schema,
    make_matcher,
    read_definition,
    reason_of,
)
from speculant.structured.probe import STACK_BYTES, Probed, ProbeLimits, Prober
from speculant.structured.spec import GrammarSource, StructuredOutputs
from speculant.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

logger = logging.getLogger(__name__)

CAPACITY = 64  # grammars to keep
MOST_BYTES = 512 * 2**20  # of memory that compiling the kept grammars took
MOST_WAITING = 1024  # callers; as many requests wait in an engine by default
MOST_NOTES = 4096  # refused forms, and forms and clients whose time is counted
COMPILERS = 2  # threads, so that one slow form does not delay all others
# A form that is not compiled within the first limits is compiled again within the next ones, by other threads.
LIMITS = (ProbeLimits(0.04, 128 * 2**20), ProbeLimits(1.0, 256 * 2**20, niceness=10))
INSTALL = 'run: pip install -c constraints.txt "speculant[structured]"'
CORRECT = "correct it; docs/structured.md has the supported forms."

K = TypeVar("K")
V = TypeVar("V")


@dataclass(eq=False)
class _Compilation:
    """The compilation of one form. client: the first of `clients`, whose callers wait. stage: index of its limits."""

    source: GrammarSource
    client: str
    work: Future[Grammar] = field(default_factory=Future)
    waiters: set[Future[Grammar]] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)
    stage: int = 0
    under_way: bool = False
    num_bytes: int = 0


class _KilledError(RequestError):
    """The probe of a form was killed: by a limit, or because other forms had used up the memory."""


class _Refusal(NamedTuple):
    """The error of a form that can't be used, and the time when that was found out."""

    at: float
    problem: str
    fix: str


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
        self._refused: OrderedDict[bytes, _Refusal] = OrderedDict()  # by digest
        self._times: OrderedDict[str, ClientTime] = OrderedDict()
        self._allowances: OrderedDict[tuple[str, bytes], Allowance] = OrderedDict()
        self._waiting: Counter[str] = Counter()
        self._lanes = tuple(ClientLane("speculant-grammars", COMPILERS, STACK_BYTES) for _ in LIMITS)
        self._guarded = False
        self._lock = threading.Lock()  # never held while a form is compiled
        self._making = threading.Lock()  # held while the prober is made

    def guard(self) -> None:
        """Expect hostile forms from now on: probe each in another process, and bound its masks more tightly."""
        self._guarded = True

    def compile(self, form: StructuredOutputs, client: str = "") -> Future[Grammar]:
        """Start to compile a form, unless it is known already. The caller may cancel the future.

        client: who waits; the forms of different clients are compiled in turn. A compilation that has not begun is
        dropped when all of its callers have cancelled. Raises CapacityError if too many callers wait, and ConfigError
        without llguidance. The future of a form that is invalid or exceeds a limit raises RequestError; the next call
        raises it at once. A client whose forms took too much time has to wait: CapacityError.
        """
        _require_library()
        source = form.source
        with self._lock:
            self._check_refused(source, client)
            known = self._known.get(source)
            if known is not None and known.work.done():
                self._known.move_to_end(source)
                return known.work
            self._check_room(client)
            compilation = known or _Compilation(source, client)
            self._known[source] = compilation
            waiter = Future[Grammar]()
            compilation.waiters.add(waiter)
            self._waiting[client] += 1
            joins = client not in compilation.clients
            compilation.clients.add(client)
            stage = compilation.stage
        waiter.add_done_callback(partial(self._leave, compilation, client))
        if joins:
            self._submit(client, compilation, stage)
        return waiter

    def metered(self, grammar: Grammar, form: StructuredOutputs, client: str = "") -> Grammar:
        """Return a grammar whose masks count among a client's; without `guard` their time is not counted.

        Raises the errors of `compile` for a form or a client that took too much time while this form was compiled.
        """
        if not self._guarded:
            return grammar
        with self._lock:
            self._check_refused(form.source, client)
            own = _noted(self._times, client, ClientTime)
            allowance = _noted(self._allowances, (client, form.source.digest), lambda: Allowance(own))
        return replace(grammar, allowance=allowance)

    def _check_refused(self, source: GrammarSource, client: str) -> None:
        """Raise the error of a form that was refused before, for everybody or because of this client's masks."""
        refused = self._refused.get(source.digest)
        if refused is not None and time.monotonic() < refused.at + REFUSED_S:
            raise RequestError(refused.problem, refused.fix)  # a new one: an error grows each time it is raised
        allowance, time_spent = self._allowances.get((client, source.digest)), self._times.get(client)
        if allowance is not None and (error := allowance.refusal) is not None:
            raise error
        if time_spent is not None and time_spent.is_over:
            raise CapacityError(
                f"the forms of this client's requests took more than {100 * CLIENT_SHARE:.0f}% of the time lately, each"
                f" token more than {1000 * SLOW_S:.0f} ms",
                "try again later, or simplify the forms.",
            )

    def _check_room(self, client: str) -> None:
        num_waiting, own = self._waiting.total(), self._waiting[client]
        free = self._most_waiting - num_waiting
        if free < 1 or (client and own >= max(1, free)):
            raise CapacityError(
                f"{num_waiting} requests wait for the forms of their outputs to be compiled, {own} of them this"
                f" client's, and max_waiting is {self._most_waiting}; one client may have as many as stay free",
                "try again later, or raise max_waiting.",
            )

    def _submit(self, client: str, compilation: _Compilation, stage: int) -> None:
        work = self._lanes[stage].submit(client, partial(self._attempt, compilation, stage))
        work.add_done_callback(_log_failure)

    def _attempt(self, compilation: _Compilation, stage: int) -> None:
        """Compile a form within the limits of a stage, unless that is done already or nobody waits for it."""
        with self._lock:
            is_current = self._known.get(compilation.source) is compilation and compilation.stage == stage
            if not is_current or compilation.under_way or compilation.work.done():
                return
            compilation.under_way = True
        try:
            result: Grammar | BaseException | None = self._within_limits(compilation, stage)
        except BaseException as error:  # noqa: BLE001 - its callers get it
            result = error
        if result is None:
            self._pass_on(compilation)
        else:
            self._deliver(compilation, result)

    def _within_limits(self, compilation: _Compilation, stage: int) -> Grammar | None:
        """Compile a form; return None if that takes too much for this stage, but maybe not for the next one."""
        source = compilation.source
        if self._guarded:
            limits = LIMITS[stage]
            with self._making:
                prober = self._prober
            probed = prober.probe(source, limits)
            if probed.exceeded in ("time", "memory") and stage + 1 < len(LIMITS):
                return None
            _check_probe(probed, limits, source)
            compilation.num_bytes = probed.num_bytes
        return self._compile(source)

    def _pass_on(self, compilation: _Compilation) -> None:
        """Queue a compilation for the next stage, or drop it if nobody waits for it any more."""
        with self._lock:
            compilation.under_way = False
            compilation.stage += 1
            if not compilation.waiters:
                del self._known[compilation.source]
            clients, stage = list(compilation.clients), compilation.stage
        for client in clients:
            self._submit(client, compilation, stage)

    def _deliver(self, compilation: _Compilation, result: Grammar | BaseException) -> None:
        """Pass a result on to the callers, and drop forms beyond the capacity."""
        with self._lock:
            _settle(compilation.work, result)
            if not isinstance(result, Grammar):
                del self._known[compilation.source]
            if isinstance(result, RequestError) and not isinstance(result, _KilledError):
                refusal = _Refusal(time.monotonic(), result.problem, result.fix)
                _noted(self._refused, compilation.source.digest, lambda: refusal)
            waiters = list(compilation.waiters)
            self._drop()
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                _settle(waiter, result)

    def _drop(self) -> None:
        """Drop compiled forms beyond the capacity: the least recently used ones of the client that has the most."""
        done = [each for each in self._known.values() if each.work.done()]
        while done and (len(self._known) > self._capacity or sum(each.num_bytes for each in done) > MOST_BYTES):
            owned = Counter(each.client for each in done)
            most = max(owned.values())
            victim = next(each for each in done if owned[each.client] == most)
            done.remove(victim)
            del self._known[victim.source]

    def _leave(self, compilation: _Compilation, client: str, waiter: Future[Grammar]) -> None:
        """Remove a caller that has the result or has cancelled. After the last one, drop a compilation not begun."""
        with self._lock:
            self._waiting -= Counter((client,))
            compilation.waiters.discard(waiter)
            idle = not (compilation.waiters or compilation.under_way or compilation.work.done())
            if idle and self._known.get(compilation.source) is compilation:
                del self._known[compilation.source]

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "speculant-masks")

    def _compile(self, source: GrammarSource) -> Grammar:
        with Converts(ConfigError, "the package llguidance can't be loaded", INSTALL):
            import llguidance  # noqa: F401 - its absence has an error of its own

        tokens, ends = self._tokens
        with Converts(RequestError, f"the {source.kind} of structured_outputs can't be used", CORRECT):
            matcher = make_matcher(tokens, source, STRANGERS if self._guarded else StepLimits())
        if matcher.is_error():
            raise _invalid(source, matcher.get_error())
        grammar = Grammar(matcher.deep_copy, tokens.vocab_size, ends, self._workers)
        first = Grammar(lambda: matcher, tokens.vocab_size, ends).constrain()
        if not bool(first.mask(()).any()):  # copies share what this one has computed
            raise RequestError(
                f"the {source.kind} of structured_outputs allows no text that this model's tokens can write", CORRECT
            )
        _check_beginning(grammar)
        return grammar

    @cached_property
    def _facts(self) -> tuple[int, list[int]]:
        """The size of the vocabulary, and its end tokens."""
        size, own = max(self._tokenizer.vocab().values()) + 1, self._tokenizer.eos_id
        ends = sorted(token for token in self._ends if token < size) or [token for token in (own,) if token is not None]
        if not ends:
            raise RequestError(
                "this checkpoint names no end token, which structured outputs need", "add it to its config.json."
            )
        return size, ends

    @cached_property
    def _tokens(self) -> tuple[LLTokenizer, frozenset[int]]:
        """The library's form of the tokenizer, and its end tokens."""
        size, ends = self._facts
        with Converts(RequestError, "structured outputs don't work with this tokenizer", "use another checkpoint."):
            return read_definition(self._tokenizer.backend.to_str(), size, ends), frozenset(ends)

    @cached_property
    def _prober(self) -> Prober:
        _ = self._tokens  # a vocabulary that the library can't read has its own error; the process would only fail
        return Prober(self._tokenizer.backend.to_str(), *self._facts)


def _settle(future: Future[Grammar], result: Grammar | BaseException) -> None:
    if isinstance(result, Grammar):
        future.set_result(result)
    else:
        future.set_exception(result)


def _log_failure(work: Future[None]) -> None:
    """Log an error of this module itself; errors of forms are delivered to their callers."""
    if (error := work.exception()) is not None:
        logger.error("compiling a form failed", exc_info=error)


def _noted(notes: OrderedDict[K, V], key: K, make: Callable[[], V]) -> V:
    """Return the value of a key, which is made if it is new, and drop the least recent values beyond `MOST_NOTES`."""
    if key not in notes:
        notes[key] = make()
    notes.move_to_end(key)
    if len(notes) > MOST_NOTES:
        notes.popitem(last=False)
    return notes[key]


def _check_probe(probed: Probed, limits: ProbeLimits, source: GrammarSource) -> None:
    """Raise RequestError for a form that exceeds its limits, or that the library refuses."""
    if probed.exceeded == "step" and not has_no_text(probed.error):
        reason = reason_of(probed.error)
        raise RequestError(f"the {source.kind} of structured_outputs exceeds its limits: {reason}", SIMPLIFY)
    time_limit = f"{limits.seconds:g} s of processor time"
    memory_limit = f"{limits.num_bytes // 2**20} MiB of memory"
    if probed.exceeded and probed.exceeded != "step":
        limit = {"time": time_limit, "memory": memory_limit}.get(probed.exceeded, f"{time_limit} or {memory_limit}")
        kind = _KilledError if probed.exceeded == "limits" else RequestError
        raise kind(f"the {source.kind} of structured_outputs takes more than {limit} to compile", SIMPLIFY)
    if probed.error:
        raise _invalid(source, probed.error)


def _invalid(source: GrammarSource, error: str) -> RequestError:
    reason, what = reason_of(error, source.kind), "a JSON schema" if is_of_schema(error) else f"the {source.kind}"
    fix = SIMPLIFY if "too" in reason or "limit" in reason else CORRECT
    return RequestError(f"{what} of structured_outputs can't be used: {reason}", fix)


def _check_beginning(grammar: Grammar) -> None:
    """Raise RequestError for a grammar that forces more bytes at the beginning than its limits allow."""
    constraint = grammar.constrain()
    if forced := constraint.forced():
        constraint.advance(forced[:1])
        constraint.mask(())  # forced bytes that use up the fuel of one step fail in the next one


def _require_library() -> None:
    """Raise ConfigError without llguidance. It is not imported here: that would block a caller's event loop."""
    if find_spec("llguidance") is None:
        raise ConfigError("structured outputs need the package llguidance, which is not installed", INSTALL)
