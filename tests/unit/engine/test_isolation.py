"""An error ends the request that causes it, and no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from speculant.cache import KVStorage
from speculant.config import Limits
from speculant.drafting import Drafter
from speculant.engine import Engine
from speculant.errors import SpeculantError
from speculant.lab.exactness import FULL_SUPPORT, History, Pair, Table, TableModel
from speculant.models import Batch, Hidden
from speculant.params import SamplingParams
from speculant.sampling import Chance
from speculant.types import CommittedRows, DraftTree, Request, Verdict
from speculant.verification import Match
from tests.fakes import (
    MakeCache,
    Rig,
    ScriptedDrafter,
    both_caches,
    build_rig,
    known_verifiers,
    model_drafter,
    paged,
)

V = 6
VICTIM = 5  # the first token of the prompt that is in trouble
FROM = 5  # tokens: when the trouble begins
LIMITS = Limits(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=48)
PROMPTS = {"first": (0, 1), "victim": (VICTIM, 0, 1), "last": (1, 2, 3)}
PAIR = Pair(2, V, FULL_SUPPORT)


class TroubleError(Exception):
    """The error that the tests raise."""


def raising(table: Table) -> Table:
    def broken(history: History) -> Sequence[float]:
        if history[0] == VICTIM and len(history) >= FROM:
            raise TroubleError
        return table(history)

    return broken


def without_numbers(table: Table) -> Table:
    def broken(history: History) -> Sequence[float]:
        return [math.nan] * V if history[0] == VICTIM and len(history) >= FROM else table(history)

    return broken


class Troubled(ScriptedDrafter):
    """Raises when it hears of the victim, at the given word."""

    def __init__(self, word: str) -> None:
        super().__init__(lambda request: [1, 2])
        self._word = word

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._fail("begin", request)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        for request in requests:
            self._fail("propose", request)
        return super().propose(requests, limits)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self._fail("observe", request)

    def _fail(self, word: str, request: Request) -> None:
        if word == self._word and request.prompt[0] == VICTIM:
            raise TroubleError


class TroubledRule(Match):
    """Raises at the third verification of the victim."""

    calls = 0

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """See `Verifier.verify`."""
        self.calls += 1
        if self.calls >= 3:
            raise TroubleError
        return super().verify(tree, p, chance)


@dataclass
class TroubledWatch:
    """Raises at the third token."""

    seen: int = 0
    saved: int = 0

    def push(self, token: int) -> str | None:
        self.seen += 1
        if self.seen == 3:
            raise TroubleError
        return None

    def push_end(self, token: int) -> None:
        self.push(token)

    def checkpoint(self) -> None:
        self.saved = self.seen

    def rollback(self) -> None:
        self.seen = self.saved


TARGETS = {"target raises": raising(PAIR.target), "target gives NaN": without_numbers(PAIR.target)}
DRAFTS = {"draft model raises": raising(PAIR.draft)}


def rig_of(trouble: str, cache: MakeCache) -> Rig:
    target = TableModel(TARGETS.get(trouble, PAIR.target), V)
    draft = TableModel(DRAFTS.get(trouble, PAIR.draft), V)
    made: Drafter = model_drafter(draft, V, limits=LIMITS, cache=cache)
    if trouble.startswith("drafter"):
        made = Troubled(trouble.split()[-1])
    rig = build_rig(target, made, length=3, limits=LIMITS, cache=cache)
    rig.expected = SpeculantError if "NaN" in trouble else TroubleError
    return rig


def add_all(rig: Rig, trouble: str = "", **distribution: Any) -> dict[str, Request]:
    """Queue all prompts; some troubles are the victim's own settings."""
    requests = {}
    for name, prompt in PROMPTS.items():
        troubled = trouble if name == "victim" else ""
        speculation = {"verification": "troubled" if troubled == "rule" else "match"} if name == "victim" else None
        params = SamplingParams(max_tokens=12, logprobs=0, prompt_logprobs=0, speculation=speculation, **distribution)
        stop_checker = TroubledWatch if troubled == "stop_checker" else None
        requests[name] = rig.add(prompt, params, name, stop_checker)[0]
    return requests


TROUBLES = ["target raises", "target gives NaN", "rule", "stop_checker"]
every_trouble = pytest.mark.parametrize("trouble", TROUBLES)
every_draft_trouble = pytest.mark.parametrize(
    "trouble", ["draft model raises", "drafter: begin", "drafter: propose", "drafter: observe"]
)


@pytest.fixture(autouse=True)
def _a_rule_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_verifiers(), "troubled", TroubledRule())


def said_without(trouble: str, cache: MakeCache, **distribution: Any) -> dict[str, list[int]]:
    """Return the outputs without the error, everything else being equal."""
    rig = rig_of("drafter: is fine" if trouble.startswith("drafter") else "", cache)
    requests = add_all(rig, **distribution)
    rig.finish()
    return {name: request.output for name, request in requests.items()}


@pytest.mark.covering(1)
@both_caches
@pytest.mark.parametrize("distribution", [{"temperature": 0}, {}], ids=["greedy", "sampled"])
@every_trouble
def test_an_error_ends_its_own_request_alone(trouble: str, distribution: dict[str, Any], cache: MakeCache) -> None:
    """The others' outputs stay the same: a pass that is repeated for each request alone draws nothing anew."""
    rig, expected = rig_of(trouble, cache), said_without(trouble, cache, **distribution)
    requests = add_all(rig, trouble, **distribution)
    outputs = rig.finish()
    told = {name: [output for output in outputs if output.request_id == name] for name in requests}
    victim = requests["victim"]
    assert (told["victim"][-1].token, told["victim"][-1].finish_reason) == (None, "error")
    assert isinstance(victim.ending.error, rig.expected)
    assert [output.token for output in told["victim"][:-1]] == victim.output, "what was told is what it has"
    assert victim.output == expected["victim"][: victim.num_output]
    assert len(victim.logprobs) == victim.num_output < 12
    for name in ("first", "last"):
        assert [output.token for output in told[name]] == requests[name].output == expected[name]
        assert requests[name].ending.reason == "length"
        assert len(requests[name].prompt_logprobs) == len(requests[name].prompt) - 1, "noted once"
    assert (rig.engine.metrics.failed, rig.engine.metrics.finished) == (1, 2)
    assert rig.engine.metrics.repeated_steps <= 1


@pytest.mark.covering(1)
@both_caches
@pytest.mark.parametrize("distribution", [{"temperature": 0}, {}], ids=["greedy", "sampled"])
@every_draft_trouble
def test_a_drafters_error_fails_no_request(trouble: str, distribution: dict[str, Any], cache: MakeCache) -> None:
    rig, expected = rig_of(trouble, cache), said_without(trouble, cache, **distribution)
    rig.drafter_may_fail = True
    requests = add_all(rig, **distribution)
    rig.finish()
    assert {name: request.output for name, request in requests.items()} == expected
    assert {request.ending.reason for request in requests.values()} == {"length"}
    assert rig.engine.metrics.drafter_errors > 0
    assert rig.engine.metrics.repeated_steps == 0
    assert requests["first"].metrics.speculative_decoding.num_draft_tokens > 0, "the others keep their drafts"


@every_trouble
def test_the_engine_continues_after_an_error(trouble: str) -> None:
    rig = rig_of(trouble, paged)
    add_all(rig, trouble)
    rig.finish()
    (later,) = rig.add(PROMPTS["first"], SamplingParams(temperature=0, max_tokens=5), "later")
    rig.finish()
    assert (later.num_output, later.ending.reason) == (5, "length")


def broken_always(history: History) -> Sequence[float]:
    raise TroubleError


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_all_sequences_can_fail_at_once(steps: int) -> None:
    target = TableModel(PAIR.target, V)
    rig = build_rig(target, model_drafter(TableModel(PAIR.draft, V), V, limits=LIMITS), length=3, limits=LIMITS)
    rig.expected = TroubleError
    requests = add_all(rig)
    for _ in range(steps):
        rig.step()
    target._table, target._known = broken_always, {}
    assert [(output.token, output.finish_reason) for output in rig.step()] == [(None, "error")] * 3
    assert all(request.ending.reason == "error" for request in requests.values())
    assert rig.finish() == []
    assert rig.engine.doubtful
    with pytest.raises(TroubleError):
        rig.engine.check_target()
    target._table, target._known = PAIR.target, {}
    rig.engine.check_target()
    assert rig.engine.free_kv_tokens() == build_rig(TableModel(PAIR.target, V), limits=LIMITS).engine.free_kv_tokens()


@every_trouble
def test_an_error_caused_by_the_request_is_not_doubtful(trouble: str) -> None:
    """Not even where it runs alone: the target computes other texts."""
    rig = rig_of(trouble, paged)
    rig.add(PROMPTS["victim"], SamplingParams(temperature=0, max_tokens=12), "victim")
    rig.finish()
    rig.engine.check_target()


class Unsociable(TableModel):
    """A model that fails for more than one sequence at a time."""

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        if len(batch.segments) > 1:
            raise TroubleError
        return super().forward(batch, storage, taps)


def drain(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()


def test_an_error_without_an_owner_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Every request is served, one at a time; the log says that this is slow."""
    rig = build_rig(Unsociable(PAIR.target, V), limits=LIMITS)
    requests, expected = add_all(rig, temperature=0), said_without("", paged, temperature=0)
    drain(rig.engine)
    assert "for all sequences together and for none alone: TroubleError" in caplog.text
    assert {name: request.output for name, request in requests.items()} == expected
    metrics = rig.engine.metrics
    assert metrics.transient_errors == metrics.repeated_steps == metrics.steps == 12
