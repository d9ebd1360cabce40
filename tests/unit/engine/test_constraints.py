"""A request's constraint advances by committed tokens, is rolled back when a step fails, and can end the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from speculant.config import Limits
from speculant.errors import ConstraintError, RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.lengths import DraftOutcome, Fixed
from speculant.metrics import StepTiming
from speculant.params import SamplingParams
from speculant.types import DraftTree, Request
from tests.automata import Automaton, AutomatonConstraint
from tests.fakes import Rig, ScriptedDrafter, build_rig

V = 4
PAIR = Pair(7, V, FULL_SUPPORT)
LOOP = Automaton({0: {0: 1, 1: 0}, 1: {2: 0, 0: 1}})
LINE = Automaton({0: {0: 1}, 1: {1: 2}, 2: {2: 3}, 3: {}})
LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=32)


def rig_with(draft: Sequence[int] = (), ends: frozenset[int] = frozenset()) -> Rig:
    drafter = ScriptedDrafter(lambda request: draft) if draft else None
    return build_rig(TableModel(PAIR.target, V), drafter, length=4, limits=LIMITS, ends=ends)


def taken(request: Request) -> list[int]:
    assert isinstance(request.constraint, AutomatonConstraint)
    return request.constraint.taken


@pytest.mark.parametrize("draft", [(), (0, 1, 2), (0, 1, 2, 3), (0, 3)])
def test_a_constraint_that_is_done_ends_its_request(draft: Sequence[int]) -> None:
    rig = rig_with(draft)
    (request,) = rig.add((0,), SamplingParams(min_tokens=9), constraint=LINE.constrain)
    rig.finish()
    assert (request.output, request.ending.reason, request.ending.stop) == ([0, 1, 2], "stop", None)
    assert taken(request) == [0, 1, 2]


def test_an_end_token_is_taken_too() -> None:
    rig = rig_with((0, 1), ends=frozenset({1}))
    (request,) = rig.add((0,), SamplingParams(), constraint=LINE.constrain)
    rig.finish()
    assert (request.output, request.ending.reason, request.ending.stop) == ([0, 1], "stop", None)
    assert taken(request) == [0, 1]


def test_each_sample_has_its_own_constraint() -> None:
    rig = rig_with((0, 2))
    requests = rig.add((0,), SamplingParams(n=3, seed=2, max_tokens=12), constraint=LOOP.constrain)
    rig.finish()
    assert len({id(request.constraint) for request in requests}) == 3
    assert len({tuple(request.output) for request in requests}) > 1
    for request in requests:
        assert taken(request) == request.output


def test_a_neighbour_without_a_constraint_is_free() -> None:
    texts = []
    for constrained in (False, True):
        rig = rig_with((0, 2))
        if constrained:
            rig.add((1,), SamplingParams(seed=1), "other", constraint=LINE.constrain)
        (request,) = rig.add((0,), SamplingParams(seed=1, max_tokens=12), "free")
        rig.finish()
        texts.append(request.output)
    assert texts[0] == texts[1]
    assert 3 in texts[0]


def test_a_beam_search_with_a_constraint_is_refused() -> None:
    rig = rig_with()
    with pytest.raises(RequestError, match="a beam search takes no constraint"):
        rig.add((0,), SamplingParams(beam_width=2), constraint=LOOP.constrain)
    assert not rig.engine.has_unfinished()


def test_a_constraint_that_allows_nothing_is_an_error() -> None:
    stuck = Automaton({0: {0: 1}, 1: {1: 5}, 5: {3: 6}, 6: {}})
    rig = rig_with((0, 1))
    rig.expected = RequestError
    (request,) = rig.add((0,), SamplingParams(logit_bias={3: -float("inf")}), constraint=stuck.constrain)
    (other,) = rig.add((0,), SamplingParams(max_tokens=9), "other")
    rig.finish()
    assert (request.output, request.ending.reason) == ([0, 1], "error")
    assert "no token is possible" in str(request.ending.error)
    assert taken(request) == [0, 1]
    assert other.num_output == 9


class TroubleError(Exception):
    """The error that the tests raise."""


class Breaking(AutomatonConstraint):
    """Raises in the calls that a test names."""

    def __init__(self, automaton: Automaton, place: str) -> None:
        super().__init__(automaton)
        self._place = place

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        if self._place == "mask" and len(self.taken) + len(tokens) == 5:
            raise TroubleError
        return super().mask(tokens)

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        if self._place == "advance" and len(self.taken) == 5:
            raise TroubleError
        super().advance(tokens)


class Slow(Breaking):
    """Fails as a grammar does that exceeds its limits."""

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        try:
            return super().mask(tokens)
        except TroubleError as error:
            raise ConstraintError("the form of this request is slow", "simplify it.") from error


@pytest.mark.parametrize("draft", [(), (0, 2, 0)])
def test_a_constraint_over_its_limits_fails_alone(draft: Sequence[int]) -> None:
    """With the constraint's own error; the step is not repeated, and the neighbours' texts do not change."""
    texts = []
    for constrained in (False, True):
        rig = rig_with(draft)
        rig.expected = RequestError
        if constrained:
            (request,) = rig.add((0,), SamplingParams(seed=2), "slow", constraint=lambda: Slow(LOOP, "mask"))
        (free,) = rig.add((0,), SamplingParams(seed=1, max_tokens=12), "free")
        (other,) = rig.add((1,), SamplingParams(seed=3, max_tokens=12), "other", constraint=LOOP.constrain)
        rig.finish()
        texts.append((free.output, other.output))
        assert rig.engine.metrics.repeated_steps == 0
    assert texts[0] == texts[1]
    assert "the form of this request is slow" in str(request.ending.error)
    assert request.ending.reason == "error"
    assert taken(request) == request.output
    assert request.num_output == 5


class BreakingWatch:
    """A stop checker that breaks at the sixth token."""

    seen = 0

    def push(self, token: int) -> str | None:
        """See `StopChecker.push`."""
        self.seen += 1
        if self.seen == 6:
            raise TroubleError
        return None

    def push_end(self, token: int) -> None:
        """See `StopChecker.push_end`."""
        self.push(token)

    def checkpoint(self) -> None:
        """See `StopChecker.checkpoint`."""

    def rollback(self) -> None:
        """See `StopChecker.rollback`."""


@pytest.mark.parametrize("penalties", [{}, {"frequency_penalty": 0.3}])
@pytest.mark.parametrize("place", ["mask", "advance", "stop checker"])
def test_a_failed_step_rolls_back_its_reservations(place: str, penalties: dict[str, float]) -> None:
    """Constraint, counts and tokens agree after an error in the middle of a verdict, and the neighbour goes on."""
    automaton = Automaton({0: {0: 1}, 1: {2: 0}})  # only one text: every draft is right
    rig = build_rig(
        TableModel(PAIR.target, V),
        ScriptedDrafter(lambda request: [(0, 2)[(request.num_output + i) % 2] for i in range(4)]),
        length=4,
        limits=LIMITS,
    )
    rig.expected = TroubleError
    watch = BreakingWatch if place == "stop checker" else None
    params = SamplingParams(max_tokens=20, **penalties)  # type: ignore[arg-type]
    (request,) = rig.add((0,), params, "victim", watch, constraint=lambda: Breaking(automaton, place))
    (other,) = rig.add((1,), params, "other", constraint=automaton.constrain)
    while not request.finished:
        before = list(request.output)
        rig.step() if place != "mask" else rig.engine.step()
    assert isinstance(request.ending.error, TroubleError)
    assert request.output == before == taken(request)
    assert 0 < len(before) < 6
    if request.counts is not None:
        counted = dict(zip(request.counts.tokens.tolist(), request.counts.counts.tolist(), strict=True))
        assert counted == {0: 0, **{token: before.count(token) for token in before}}
    while not other.finished:
        rig.engine.step()
    assert other.output == [0, 2] * 10


class Unrepentant(AutomatonConstraint):
    """Raises at its third token, and when that is taken back."""

    def advance(self, tokens: Sequence[int]) -> None:
        """See `Constraint.advance`."""
        if len(self.taken) == 2:
            raise TroubleError
        super().advance(tokens)

    def rollback(self, n: int) -> None:
        """See `Constraint.rollback`."""
        raise NotImplementedError


def test_a_failed_rollback_of_a_constraint_fails_its_request() -> None:
    rig = rig_with((0, 1, 0))
    rig.expected = TroubleError
    (request,) = rig.add((1,), SamplingParams(), "bad", constraint=lambda: Unrepentant(LOOP))
    (other,) = rig.add((0,), SamplingParams(temperature=0, max_tokens=12), "good")
    rig.finish()
    assert isinstance(request.ending.error, TroubleError)
    assert (other.num_output, other.ending.reason) == (12, "length")
    assert rig.engine.metrics.repeated_steps == 0


class Reusing(AutomatonConstraint):
    """Writes every mask into the same buffer."""

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton)
        self._buffer = torch.zeros(1, dtype=torch.int32)

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        mask = super().mask(tokens)
        self._buffer.zero_()
        if mask is not None and len(mask):
            self._buffer.copy_(mask)
        return self._buffer


def test_a_constraint_can_reuse_its_mask() -> None:
    texts = []
    for kind in (AutomatonConstraint, Reusing):
        rig = rig_with((0, 1, 0, 2))
        (request,) = rig.add((0,), SamplingParams(seed=4, max_tokens=12), constraint=lambda kind=kind: kind(LOOP))
        rig.finish()
        texts.append(request.output)
    assert texts[0] == texts[1]


class Forcing(AutomatonConstraint):
    """Forces the same tokens everywhere."""

    def __init__(self, automaton: Automaton, tokens: Sequence[int]) -> None:
        super().__init__(automaton)
        self._tokens = list(tokens)

    def forced(self) -> list[int]:
        """See `Constraint.forced`."""
        return self._tokens


class Bounded(ScriptedDrafter):
    """Records the limits above 0 that it is called with."""

    def __init__(self, propose: Callable[[Request], Sequence[int]]) -> None:
        super().__init__(propose)
        self.limits: list[int] = []

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        self.limits += filter(None, limits)
        return super().propose(requests, limits)


def forced_run(
    tokens: Sequence[int], length: int = 4, max_tokens: int = 9, speculation: object = None
) -> tuple[Rig, Request, list[int]]:
    drafter = Bounded(lambda request: (0, 1))
    rig = build_rig(TableModel(PAIR.target, V), drafter, length=length, limits=LIMITS)
    params = SamplingParams(seed=1, max_tokens=max_tokens, speculation=speculation)  # type: ignore[arg-type]
    (request,) = rig.add((0,), params, constraint=lambda: Forcing(LOOP, tokens))
    return rig, request, drafter.limits


def test_forced_tokens_need_no_drafter() -> None:
    rig, request, asked = forced_run((0, 2, 1))
    rig.finish()
    metrics = request.metrics.speculative_decoding
    assert not asked
    assert metrics.num_draft_tokens > 0
    assert request.num_output == 9


def test_forced_tokens_stay_within_limits() -> None:
    """A draft leaves room for one more token before max_tokens; the policy's length does not bound it."""
    rig, request, _ = forced_run((0, 1) * 20, length=0, max_tokens=5)
    rig.step()
    assert request.metrics.speculative_decoding.num_draft_tokens == 4
    rig.finish()
    assert request.num_output == 5


@pytest.mark.parametrize("speculation", [False, {"num_speculative_tokens": 0}])
def test_forced_tokens_without_speculation(speculation: object) -> None:
    rig, request, asked = forced_run((0, 2, 1), speculation=speculation)
    rig.finish()
    assert request.metrics.speculative_decoding.num_draft_tokens == 0
    assert not asked


@pytest.mark.parametrize("tokens", [(V,), (-1, 0)])
def test_forced_tokens_of_no_vocabulary_are_dropped(tokens: Sequence[int]) -> None:
    rig, request, asked = forced_run(tokens)
    rig.finish()
    assert asked
    assert request.num_output == 9


def test_forced_drafts_are_marked_for_the_policy() -> None:
    """They are rows of the pass, but no drafter was asked; drafts of other requests beside them are not marked."""
    policy = Watching(2)
    drafter = ScriptedDrafter(lambda request: (0, 1))
    rig = build_rig(TableModel(PAIR.target, V), drafter, limits=LIMITS, draft_length=policy)
    params = SamplingParams(seed=1, max_tokens=6)
    rig.add((0,), params, "forced", constraint=lambda: Forcing(LOOP, (0, 2)))
    rig.finish()
    assert {outcome.forced for outcomes in policy.seen for outcome in outcomes} == {True}
    policy.seen.clear()
    rig.add((0,), params, "again", constraint=lambda: Forcing(LOOP, (0, 2)))
    rig.add((0,), params, "free")
    rig.finish()
    seen = {(each.request.request_id, each.forced) for outcomes in policy.seen for each in outcomes}
    assert seen == {("again", True), ("free", False)}


class Watching(Fixed):
    """Records the outcomes that it observes."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.seen: list[list[DraftOutcome]] = []

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`."""
        self.seen.append([*outcomes])


class Preparing(AutomatonConstraint):
    """Records the paths that it prepares, and the masks that are read."""

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton)
        self.prepared: list[list[list[int]]] = []
        self.asked: list[list[int]] = []

    def prepare(self, paths: Iterable[Sequence[int]]) -> None:
        """See `Constraint.prepare`."""
        self.prepared.append([list(path) for path in paths])
        self.asked = []

    def mask(self, tokens: Sequence[int]) -> Tensor | None:
        """See `Constraint.mask`."""
        self.asked.append(list(tokens))
        return super().mask(tokens)


def test_masks_are_prepared_before_they_are_needed() -> None:
    rig = rig_with((0, 2))
    (request,) = rig.add((0, 1, 2), SamplingParams(seed=1, max_tokens=6), constraint=lambda: Preparing(LOOP))
    constraint = request.constraint
    assert isinstance(constraint, Preparing)
    while not request.finished:
        rig.step()
        assert constraint.prepared[-1] == constraint.asked
    assert [[]] in constraint.prepared  # the prompt's
    assert [[], [0], [0, 2]] in constraint.prepared
