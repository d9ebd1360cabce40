"""The engine encodes sources before it decodes: errors, times, checks of requests, and what drafters read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.cache import KVStorage, Source
from speculant.config import Limits
from speculant.constraints import Constraint, forced_tokens
from speculant.drafting import DrafterNeeds, DrafterReads, FallbackDrafter, SubDrafter
from speculant.engine import Engine, EngineOptions, runner as runner_module
from speculant.errors import RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.lengths import DraftOutcome, Fixed
from speculant.metrics import StepTiming
from speculant.models import Batch, Hidden, OutputRules
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.scheduling import Schedule
from speculant.types import DraftTree, Request
from tests.fakes import BLOCK, Rig, ScriptedDrafter, build_rig, few_blocks, known_verifiers

V = 6
VICTIM = 5  # the first token of a source that can't be encoded
LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=24)
PAIR = Pair(2, V, FULL_SUPPORT)
BLOCKS = few_blocks(40)
SOURCES = {"first": (0, 1), "victim": (VICTIM, 1), "twin": (VICTIM, 1), "last": (1, 2, 3)}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class TroubleError(Exception):
    """The error that the tests raise."""


class Fragile(TableModel):
    """An encoder-decoder model whose encoder or decoder fails for a while, after it has written."""

    def __init__(self, fails: Callable[[Batch], bool] = lambda batch: False, decodes: int = 0) -> None:
        super().__init__(PAIR.target, V, has_source=True)
        self.fails, self.decodes = fails, decodes  # decodes: passes of the decoder that fail

    def encode(self, batch: Batch, storage: KVStorage) -> Tensor:
        """See `EncodesSources.encode`."""
        states = super().encode(batch, storage)
        if self.fails(batch):
            raise TroubleError
        return states

    def forward(self, batch: Batch, storage: KVStorage, taps: Sequence[int] = ()) -> Hidden:
        """See `CausalLM.forward`."""
        hidden = super().forward(batch, storage, taps)
        self.decodes -= 1
        if self.decodes >= 0:
            raise TroubleError
        return hidden


def add_all(rig: Rig) -> dict[str, Request]:
    return {name: rig.add((0,), GREEDY, name, source=source)[0] for name, source in SOURCES.items()}


def usual() -> dict[str, list[int]]:
    rig = build_rig(TableModel(PAIR.target, V, has_source=True), limits=LIMITS, cache=BLOCKS)
    requests = add_all(rig)
    rig.finish()
    return {name: request.output for name, request in requests.items()}


def test_a_source_that_fails_ends_the_requests_that_hold_it() -> None:
    rig = build_rig(Fragile(lambda batch: VICTIM in batch.tokens.tolist()), limits=LIMITS, cache=BLOCKS)
    rig.expected = TroubleError
    requests, expected = add_all(rig), usual()
    rig.finish()
    reasons = {name: request.ending.reason for name, request in requests.items()}
    assert reasons == {"first": "length", "victim": "error", "twin": "error", "last": "length"}
    assert all(requests[name].output == expected[name] for name in ("first", "last"))
    assert requests["victim"].ending.error is requests["twin"].ending.error
    assert (rig.engine.metrics.failed, rig.engine.metrics.repeated_steps) == (2, 1)


def test_a_request_alone_ends_with_the_error_of_its_source() -> None:
    rig = build_rig(Fragile(lambda batch: True), limits=LIMITS, cache=BLOCKS)
    rig.expected = TroubleError
    (request,) = rig.add((0,), GREEDY, source=(0, 1))
    outputs = rig.finish()
    assert [output.finish_reason for output in outputs] == ["error"]
    assert isinstance(request.ending.error, TroubleError)


@pytest.mark.parametrize(
    "model",
    [Fragile(lambda batch: len(batch.segments) > 1), Fragile(decodes=1)],
    ids=["several sources together", "the pass after the encoder"],
)
def test_an_error_without_an_owner_costs_nobody_anything(model: Fragile) -> None:
    rig = build_rig(model, limits=LIMITS, cache=BLOCKS)
    rig.pass_may_fail = True
    requests = add_all(rig)
    rig.finish()
    assert {name: request.output for name, request in requests.items()} == usual()
    assert rig.engine.metrics.transient_errors == 1


def test_an_interrupt_of_the_encoder_is_rolled_back() -> None:
    model = Fragile()
    rig = build_rig(model, limits=LIMITS, cache=BLOCKS)
    requests = add_all(rig)

    def interrupt(batch: Batch) -> bool:
        raise KeyboardInterrupt

    model.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.step()
    rig.engine.check()
    model.fails = lambda batch: False
    rig.finish()
    assert {name: request.output for name, request in requests.items()} == usual()


def test_the_target_is_checked_with_a_source() -> None:
    rig = build_rig(Fragile(), limits=LIMITS, cache=BLOCKS)
    rig.engine.check_target()
    assert rig.engine.free_kv_tokens() == 40 * BLOCK
    broken = build_rig(Fragile(lambda batch: True), limits=LIMITS, cache=BLOCKS)
    with pytest.raises(TroubleError):
        broken.engine.check_target()
    assert broken.engine.free_kv_tokens() == 40 * BLOCK


def test_a_full_cache_does_not_fail_the_check_of_the_target() -> None:
    """The sequences that hold it are computed next: an engine would take its lack of room for the model's error."""
    for blocks in (2, 3, 4):
        rig = build_rig(Fragile(), limits=Limits(8, 2, 24), cache=few_blocks(blocks))
        (request,) = rig.add((0,), GREEDY, source=(0, 1, 2, 3))
        rig.step()
        held = rig.engine.free_kv_tokens()
        rig.engine.check_target()
        assert rig.engine.free_kv_tokens() == held
        rig.engine.check()
        assert request.ending.error is None


# --- times and totals


class Noting(Fixed):
    """Drafts two tokens, and notes the timings, and how many sequences it has chosen for."""

    def __init__(self) -> None:
        super().__init__(2)
        self.timings: list[StepTiming] = []
        self.counts: list[int] = []

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        self.counts.append(len(schedule.items))
        return super().choose(schedule)

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""
        self.timings.append(timing)


def test_the_encoder_s_time_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, clock, encode = Noting(), [0.0], runner_module.encode_sources

    def slow(*arguments: Any) -> None:
        encode(*arguments)
        clock[0] += 100.0

    monkeypatch.setattr("speculant.engine.step.encode_sources", slow)
    monkeypatch.setattr("time.perf_counter", lambda: clock.__setitem__(0, clock[0] + 0.001) or clock[0])
    drafter = ScriptedDrafter(lambda request: [1, 2])
    rig = build_rig(
        TableModel(PAIR.target, V, has_source=True), drafter, limits=LIMITS, cache=BLOCKS, draft_length=policy
    )
    (request,) = rig.add((0,), GREEDY, source=(1, 2))
    rig.step()
    (late,) = rig.add((0,), GREEDY, "late", source=(3,))
    rig.finish()
    metrics, timing = rig.engine.metrics, request.metrics.timing
    assert metrics.encode_s == pytest.approx(200, abs=0.1)
    assert metrics.draft_s + metrics.verify_s + metrics.other_s < 1
    assert timing.encode_s == pytest.approx(200, abs=0.1), "it waited for the other one's source too"
    assert late.metrics.timing.encode_s == pytest.approx(100, abs=0.1)
    assert timing.draft_s + timing.verify_s < 1
    assert len([each for each in policy.timings if each.encode_s > 99]) == 2
    assert all(each.draft_s + each.verify_s + each.rest_s < 1 for each in policy.timings)


def test_no_policy_is_asked_in_a_step_that_only_encodes() -> None:
    """The longest source of an engine with one sequence takes all rows of a step."""
    policy, target = Noting(), TableModel(PAIR.target, V, has_source=True)
    drafter = ScriptedDrafter(lambda request: [1, 2])
    rig = build_rig(target, drafter, limits=Limits(32, 1, 4), cache=BLOCKS, draft_length=policy)
    (request,) = rig.add((0,), GREEDY, source=(1, 2, 3, 4))
    rig.step()
    assert (target.num_encoded, target.num_rows, policy.counts, policy.timings) == ([4], [], [], [])
    rig.finish()
    assert request.num_output == 8
    assert min(policy.counts) == 1


def test_tokens_of_sources_are_prompt_tokens() -> None:
    rig = build_rig(TableModel(PAIR.target, V, has_source=True), limits=LIMITS, cache=BLOCKS)
    add_all(rig)
    rig.finish()
    metrics = rig.engine.metrics
    assert metrics.prompt_tokens == sum(map(len, SOURCES.values())) + len(SOURCES)
    assert metrics.computed_tokens == 2 + 2 + 3 + 4 + 4 * 8, "the twin's source is encoded once"


# --- requests


def engine_of(has_source: bool = True, **options: Any) -> Engine:
    target = TableModel(PAIR.target, V, has_source=has_source)
    made = EngineOptions(LIMITS, seed=0, end_token_ids=frozenset({0}), **options)
    cache = BLOCKS(target.cache_shape, LIMITS)
    return Engine(made, target, cache, KeyedChances(), known_verifiers(), Fixed(0))


BAD: Mapping[str, tuple[bool, list[int], list[Any], str]] = {
    "no source": (True, [4], [], "the source has no tokens"),
    "too long": (True, [4], [1] * 22, r"22 tokens and at most 21 are encoded in one pass.*max_num_batched_tokens"),
    "unknown token": (True, [4], [1, V], r"the source has 6, which is not a token id from 0 to 5"),
    "no token": (True, [4], ["x"], "the source has 'x'"),
    "no start": (True, [1, 4], [1], r"the decoder's prompt begins with \[1\], and the model's outputs with \[4\]"),
    "no prompt": (True, [], [1], "the prompt has no tokens"),
    "no encoder": (False, [4], [1], "the request has a source, and the model has no encoder"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_source_that_cannot_be_served_is_refused(name: str) -> None:
    has_source, prompt, source, words = BAD[name]
    engine = engine_of(has_source, start_tokens=(4,) if has_source else ())
    with pytest.raises(RequestError, match=f"(?s){words}.*Fix: ") as caught:
        engine.check_request(prompt, GREEDY, source=source)
    assert caught.value.fix
    with pytest.raises(RequestError):
        engine.add_request(prompt, GREEDY, "a", source=source)
    assert not engine.has_unfinished()


def test_the_longest_source_is_served() -> None:
    engine = engine_of(start_tokens=(4,))
    (request,) = engine.add_request([4, 1], GREEDY, "a", source=[1] * 21)
    while engine.has_unfinished():
        engine.step()
    assert request.ending.reason in ("stop", "length")


# --- forced and banned tokens


def outputs(rules: OutputRules, prompt: Sequence[int] = (4,), **values: Any) -> list[Request]:
    engine = engine_of(output_rules=rules)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": False, **values})
    requests = engine.add_request(prompt, params, "a", source=[1, 2])
    while engine.has_unfinished():
        engine.step()
    return requests


@pytest.mark.parametrize("values", [{}, {"temperature": 1, "seed": 3}, {"beam_width": 3, "n": 2, "temperature": 0}])
def test_a_checkpoint_s_tokens_are_forced_and_banned(values: dict[str, Any]) -> None:
    for first in range(1, V):
        found = outputs(OutputRules(first, (0,), ((1,), (2, 3))), **values)
        for request in found:
            text = request.output
            assert text[0] == first, "a forced token may be a banned one"
            assert 1 not in text[1:]
            assert (2, 3) not in itertools.pairwise(text)
            assert request.ending.reason == "stop"
            assert text[-1] == 0


def test_tokens_are_forced_where_transformers_forces_them() -> None:
    rules = OutputRules(first=3, last=(2,))
    longer = outputs(rules, (4, 1))[0].output
    free = outputs(OutputRules(last=(2,)), (4, 1))[0].output
    assert longer == free, "only a prompt of one token is followed by the forced one"
    (ignoring,) = outputs(rules, ignore_eos=True)
    assert (ignoring.output[0], ignoring.ending.reason, ignoring.num_output) == (3, "length", 6)
    plain = outputs(OutputRules(first=3), ignore_eos=True)[0].output
    assert ignoring.output == plain, "no end is forced where ends are ignored"
    (longest,) = outputs(rules, max_tokens=6, min_tokens=6)
    assert (longest.num_output, longest.ending.reason) == (6, "length")


def test_a_request_s_words_hold_after_a_forced_token() -> None:
    rules = OutputRules(first=3, last=(0,))
    for request in outputs(rules, allowed_token_ids=[1, 2], n=2, temperature=1, seed=1):
        assert request.output[0] == 3
        assert {*request.output[1:]} <= {1, 2}
        assert (request.ending.reason, request.num_output) == ("length", 6), "no end is forced that is not allowed"


class Counting(Constraint):
    """A form: the tokens 1, 2 and 4 in turn, and then the end."""

    def __init__(self) -> None:
        self.place = 0

    def mask(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `Constraint.mask`."""
        return torch.tensor([1 << [1, 2, 4, 0][min(self.place + len(tokens), 3)]], dtype=torch.int32)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        for token in tokens:
            assert token == [1, 2, 4, 0][self.place]
            self.place += 1

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        self.place -= n
        assert self.place >= 0

    @property
    def is_done(self) -> bool:
        """See `Constraint.is_done`."""
        return self.place >= 3

    def forced(self) -> list[int]:
        """See `forced_tokens`."""
        return [1, 2, 4][self.place :]


def test_a_form_begins_after_a_forced_token() -> None:
    engine = engine_of(output_rules=OutputRules(first=3, last=(0,)))
    (request,) = engine.add_request([4], GREEDY, "a", source=[1], constraint=Counting)
    while engine.has_unfinished():
        engine.step()
    assert (request.output, request.ending.reason) == ([3, 1, 2, 4], "stop")
    assert request.constraint is not None
    assert request.constraint.is_done
    request.constraint.rollback(3)
    request.shorten(2)
    assert not request.constraint.is_done
    assert forced_tokens(request.constraint, V) == [1, 2, 4]
    request.constraint.rollback(1)
    request.shorten(1)
    assert forced_tokens(request.constraint, V) == [3, 1, 2, 4]
    (cut,) = engine.add_request([4], replace(GREEDY, max_tokens=3), "b", source=[1], constraint=Counting)
    while engine.has_unfinished():
        engine.step()
    assert (cut.output, cut.ending.reason) == ([3, 1, 2], "length"), "a form is not ended before its end"


def test_without_rules_a_request_has_no_constraint() -> None:
    assert outputs(OutputRules())[0].constraint is None


# --- drafters


class Reader(ScriptedDrafter):
    """Drafts a source's first tokens from the encoder's result, which is one-hot; `fails` counts its failing calls."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(lambda request: self.read[request.seq_id], DrafterNeeds(reads=DrafterReads(encoder=True)))
        self.read: dict[int, list[int]] = {}
        self.fails = fails

    def observe_source(self, request: Request, source: Source) -> None:
        """See `Drafter.observe_source`."""
        assert source.states is not None
        self.fails -= 1
        if self.fails >= 0:
            raise TroubleError
        self.read[request.seq_id] = source.states.argmax(-1).tolist()
        assert tuple(self.read[request.seq_id]) == source.tokens == request.source

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`; every sequence was observed."""
        return super().propose(requests, limits)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self.read.pop(request.seq_id, None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_drafter_reads_the_encoder_s_result(fails: int, combined: bool) -> None:
    """Also of a source that was encoded for another request, after preemption, and after an error of its own."""
    reader = Reader(fails)
    drafter = FallbackDrafter([SubDrafter("reader", reader, 2)], V) if combined else reader
    target = TableModel(PAIR.target, V, has_source=True)
    rig = build_rig(target, drafter, length=3, limits=replace(LIMITS, max_num_seqs=3), cache=few_blocks(9))
    rig.drafter_may_fail = fails > 0
    requests = [
        rig.add((0,), SamplingParams(seed=number, max_tokens=14), str(number), source=source)[0]
        for number, source in enumerate([(1, 2, 3), (4,), (1, 2, 3), (3, 2, 1, 1)])
    ]
    rig.finish()
    assert all(request.metrics.speculative_decoding.num_draft_tokens > 0 for request in requests)
    assert rig.engine.metrics.preemptions > 0
    assert rig.engine.metrics.drafter_errors == fails
    assert not reader.read


def test_states_are_kept_only_for_drafters_that_read_them() -> None:
    for drafter, kept in ((ScriptedDrafter(lambda request: [1]), False), (Reader(), True)):
        rig = build_rig(TableModel(PAIR.target, V, has_source=True), drafter, length=2, limits=LIMITS, cache=BLOCKS)
        (request,) = rig.add((0,), GREEDY, source=(1, 2))
        rig.step()
        source = rig.engine._scheduler.sources.of(request.seq_id)
        assert source is not None
        assert (source.states is not None) == kept
        assert not kept or torch.equal(source.states, torch.eye(V, dtype=torch.float64)[[1, 2]])
