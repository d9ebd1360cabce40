"""A guard compiles each form in another process first: a hostile one is refused there, once, and delays nobody else."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from speculant.errors import CapacityError, RequestError
from speculant.structured import (
    Grammar,
    Grammars,
    GrammarSource,
    Probed,
    ProbeLimits,
    Prober,
    StructuredOutputs,
    grammars as module,
)
from speculant.text import Tokenizer
from tests.hostile_forms import combinations
from tests.models import END

WIDE = ProbeLimits(20.0, 2**30)


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


@pytest.fixture(scope="module")
def prober(tokenizer: Tokenizer) -> Prober:
    """Probe forms over the small vocabulary."""
    pytest.importorskip("llguidance")
    return Prober(tokenizer.backend.to_str(), 258, {END})


SLOW = StructuredOutputs(**combinations(0)).source


def test_an_ordinary_form_keeps_within_its_limits(prober: Prober) -> None:
    probed = prober.probe(regex("[a-z]+").source, WIDE)
    assert (probed.exceeded, probed.error) == ("", "")
    assert 0 <= probed.num_bytes < 2**27


def test_the_library_s_error_is_passed_on(prober: Prober) -> None:
    assert "unclosed group" in prober.probe(regex("(a").source, WIDE).error


@pytest.mark.parametrize("limit", ["time", "memory"])
def test_a_form_over_a_limit_is_stopped(prober: Prober, limit: str) -> None:
    limits = ProbeLimits(0.01, 2**30) if limit == "time" else ProbeLimits(20.0, 2**22)
    assert prober.probe(SLOW, limits).exceeded == limit


def test_probes_run_side_by_side(prober: Prober) -> None:
    with ThreadPoolExecutor(6) as pool:
        found = [pool.submit(prober.probe, regex(text).source, WIDE) for text in "abcdef"]
        assert [each.result(30).exceeded for each in found] == [""] * 6


def test_a_killed_process_is_started_again(tokenizer: Tokenizer) -> None:
    prober = Prober(tokenizer.backend.to_str(), 258, {END})
    prober.probe(regex("a").source, WIDE)
    requests = prober._requests
    assert requests is not None
    requests.shutdown(2)  # the process sees its end
    assert prober.probe(regex("b").source, WIDE).exceeded == ""
    assert prober._requests is not requests


def test_a_low_priority_counts_beside_the_server(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives sessions equal shares of the processors. An interrupt from the keyboard goes to one group alone."""
    noted = MagicMock(wraps=weakref.finalize)
    monkeypatch.setattr(weakref, "finalize", noted)
    prober = Prober(tokenizer.backend.to_str(), 258, {END})
    prober.probe(regex("a").source, WIDE)
    pid = noted.call_args.args[2].pid
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgid(0)


def test_a_process_that_can_not_start_is_reported() -> None:
    prober = Prober("no tokenizer", 2, {1})
    with pytest.raises(CapacityError, match="can't be started"):
        prober.probe(regex("a").source, WIDE)


class ScriptedProber:
    """Answers by the texts of forms: "slow" exceeds the first limits, "hostile" all of them."""

    def __init__(self) -> None:
        self.probed: list[tuple[str, int]] = []
        self.go, self.held = threading.Event(), threading.Semaphore(0)
        self.go.set()

    def probe(self, source: GrammarSource, limits: ProbeLimits) -> Probed:
        """See `Prober.probe`."""
        stage = module.LIMITS.index(limits)
        self.probed.append((source.text, stage))
        if "wait" in source.text and (stage or "slow" not in source.text):
            self.held.release()
            assert self.go.wait(20)
        if "hostile" in source.text or ("slow" in source.text and not stage):
            return Probed("time")
        if "large" in source.text:
            return Probed("memory")
        return Probed("limits" if "crash" in source.text else "", num_bytes=module.MOST_BYTES // 4)


Scripted = tuple[Grammars, ScriptedProber]


def guarded(tokenizer: Tokenizer, **limits: int) -> Scripted:
    """Return guarded grammars, and the prober that answers for them."""
    grammars, prober = Grammars(tokenizer, {END}, **limits), ScriptedProber()
    grammars.__dict__["_prober"] = prober
    grammars.guard()
    return grammars, prober


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Scripted:
    return guarded(tokenizer)


def test_a_slow_form_gets_a_second_attempt(scripted: Scripted) -> None:
    grammars, prober = scripted
    assert isinstance(grammars.compile(regex("slow")).result(20), Grammar)
    assert prober.probed == [("slow", 0), ("slow", 1)]


@pytest.mark.parametrize(("text", "limit"), [("hostile", "1 s of processor time"), ("large", "256 MiB of memory")])
def test_a_form_over_the_limits_is_refused_once(scripted: Scripted, text: str, limit: str) -> None:
    """The error names limit and remedy, for other clients too, and the form costs nothing again."""
    grammars, prober = scripted
    with pytest.raises(RequestError, match=f"the regex of structured_outputs takes more than {limit}"):
        grammars.compile(regex(text), "one").result(20)
    count = len(prober.probed)
    with pytest.raises(RequestError, match=f"(?s)takes more than {limit}.*Fix: simplify it"):
        grammars.compile(regex(text), "other")
    assert len(prober.probed) == count


def test_a_killed_probe_is_tried_again(scripted: Scripted) -> None:
    """Other forms may have used up the memory."""
    grammars, prober = scripted
    for count in (1, 2):
        with pytest.raises(RequestError, match="more than 0.04 s of processor time or 128 MiB of memory"):
            grammars.compile(regex("crash")).result(20)
        assert len(prober.probed) == count


def test_slow_forms_of_a_client_wait_for_each_other_alone(scripted: Scripted) -> None:
    """Ten that never end delay neither a quick form nor the slow one of another client."""
    grammars, prober = scripted
    prober.go.clear()
    held = [grammars.compile(regex(f"slow{number}"), "hostile") for number in range(10)]
    for future in held:
        assert future.result(20)
    waiting = [grammars.compile(regex(f"slow wait{number}"), "hostile") for number in range(3)]
    assert prober.held.acquire(timeout=20)
    assert grammars.compile(regex("quick"), "modest").result(20)
    assert grammars.compile(regex("slow too"), "modest").result(20)
    prober.go.set()
    assert all(future.result(20) for future in waiting)


def test_one_client_can_not_fill_the_queue(tokenizer: Tokenizer) -> None:
    grammars, prober = guarded(tokenizer, most_waiting=8)
    prober.go.clear()
    waiting = [grammars.compile(regex(f"wait{number}"), "greedy") for number in range(4)]
    with pytest.raises(CapacityError, match=r"4 of them this client's"):
        grammars.compile(regex("wait more"), "greedy")
    waiting.append(grammars.compile(regex("wait too"), "modest"))
    prober.go.set()
    assert all(future.result(20) for future in waiting)


def test_a_burst_of_one_client_with_one_form_is_served(scripted: Scripted) -> None:
    """Many requests of a client alone may wait while the process that probes forms begins."""
    grammars, prober = scripted
    prober.go.clear()
    waiting = [grammars.compile(regex("wait"), "alone") for _ in range(500)]
    prober.go.set()
    assert all(future.result(20) for future in waiting)


def test_notes_of_many_large_forms_are_small(scripted: Scripted) -> None:
    """Otherwise a client could fill the memory with forms that are refused."""
    grammars, prober = scripted
    tracemalloc.start()
    try:
        for number in range(40):
            form = regex(f"hostile{number}" + "x" * 60_000)
            grammars.metered(Grammar(MagicMock(), 1, frozenset()), form, "greedy")
            with pytest.raises(RequestError, match="to compile"):
                grammars.compile(form, "greedy").result(20)
            prober.probed.clear()
        gc.collect()  # errors and their tracebacks
        assert tracemalloc.get_traced_memory()[0] < 10 * 60_000
    finally:
        tracemalloc.stop()


def test_a_tokenizer_that_is_unreadable_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, in place of one that asks the client to try again."""
    monkeypatch.setattr(module, "Prober", lambda *_: pytest.fail("it starts a process"))
    backend = SimpleNamespace(to_str=lambda: "no tokenizer")
    grammars = Grammars(SimpleNamespace(vocab=lambda: {"a": 0, "b": 1}, eos_id=1, backend=backend), {1})  # type: ignore[arg-type]
    grammars.guard()
    with pytest.raises(RequestError, match="don't work with this tokenizer"):
        grammars.compile(regex("a")).result(20)


def test_a_client_drops_its_own_forms_first(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, {END}, capacity=4)
    mine = grammars.compile(regex("mine"), "modest").result(20)
    for number in range(9):
        grammars.compile(regex(f"x{number}"), "greedy").result(20)
    assert grammars.compile(regex("mine"), "modest").result(20) is mine
    assert len(grammars._known) == 4


def test_kept_forms_are_bounded_by_memory(scripted: Scripted) -> None:
    grammars, _ = scripted
    for number in range(9):
        grammars.compile(regex(f"x{number}")).result(20)
    assert len(grammars._known) == 4, "each takes a quarter of the memory"


def test_slow_masks_end_a_client_s_form(scripted: Scripted, tokenizer: Tokenizer) -> None:
    """Sequences of the form end, and the client has to wait with others; other clients are not affected."""
    grammars, _ = scripted
    form = regex("[ab]+")
    grammar = grammars.compile(form, "slow").result(20)
    slow, second, other = (
        grammars.metered(grammar, form, client).constrain() for client in ("slow", "slow", "other client")
    )
    assert slow.mask(()).any()
    allowance = grammars._allowances["slow", form.source.digest]
    allowance.spend(1.0)
    assert slow.mask(()).any(), "one call is excused"
    allowance.spend(1.0)
    (letter,) = tokenizer.encode("a")
    assert not slow.mask((letter,)).any(), "a draft is only cut short"
    assert slow.forced() == []
    slow.advance([letter])
    for sequence in (slow, second):
        with pytest.raises(RequestError, match="the form of this request is slow"):
            sequence.mask(())
    with pytest.raises(RequestError, match="the form of this request is slow"):
        grammars.compile(form, "slow")
    assert other.mask(()).any()
    assert grammars.compile(form, "other client").result(20) is grammar
    with pytest.raises(CapacityError, match="more than 10% of the time"):
        grammars.compile(regex("[bc]+"), "slow")


def test_a_client_that_is_over_its_time_waits(scripted: Scripted) -> None:
    """Also with forms that were already being compiled: otherwise all of them would follow at once."""
    grammars, _ = scripted
    forms = [regex(text) for text in ("[ab]+", "[bc]+")]
    first, second = (grammars.compile(form, "slow").result(20) for form in forms)
    grammars.metered(first, forms[0], "slow")
    grammars._times["slow"].spend(1.0)
    with pytest.raises(CapacityError, match="more than 10% of the time"):
        grammars.metered(second, forms[1], "slow")
    assert grammars.metered(second, forms[1], "other client").allowance is not None


def test_masks_are_counted(scripted: Scripted, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, _ = scripted
    form = regex("[ab]+")
    constraint = grammars.metered(grammars.compile(form, "c").result(20), form, "c").constrain()
    counted: list[float] = []
    monkeypatch.setattr(grammars._allowances["c", form.source.digest], "spend", counted.append)
    constraint.mask(())
    constraint.forced()
    constraint.advance(tokenizer.encode("a"))
    assert not constraint.is_done
    assert len(counted) == 5, "two masks, two looks ahead and one token"
    assert all(seconds > 0 for seconds in counted)


def test_without_a_guard_nothing_is_counted(grammars: Grammars) -> None:
    grammar = grammars.compile(regex("[ab]+")).result(20)
    assert grammars.metered(grammar, regex("[ab]+"), "c") is grammar
