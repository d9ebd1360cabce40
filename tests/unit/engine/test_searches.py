"""A beam search that fails, is aborted or finds too few texts ends with all its samples, and with no other request."""

from __future__ import annotations

import math

import pytest

from speculant.config import Limits
from speculant.errors import CapacityError, RequestError
from speculant.lab.exactness import FULL_SUPPORT, History, Pair, TableModel
from speculant.params import SamplingParams
from speculant.types import StepOutput
from tests.beams import found_by
from tests.fakes import Rig, build_rig

PAIR = Pair(2, 5, FULL_SUPPORT)
LIMITS = Limits(max_model_len=32, max_num_seqs=3, max_num_batched_tokens=48)
SEARCH = SamplingParams(beam_width=3, n=3, max_tokens=8)


class TroubleError(Exception):
    """The error that the tests raise."""


class Watch:
    """Raises at the third token of the sample with the given index; counts its instances."""

    made = 0

    def __init__(self, index: int | None = None) -> None:
        self.raises = index == Watch.made
        self.seen: list[int] = []
        self.saved = 0
        Watch.made += 1

    def push(self, token: int) -> str | None:
        self.seen.append(token)
        if self.raises and len(self.seen) == 3:
            raise TroubleError
        return None

    def push_end(self, token: int) -> None:
        self.push(token)

    def checkpoint(self) -> None:
        self.saved = len(self.seen)

    def rollback(self) -> None:
        del self.seen[self.saved :]


def failing_at(length: int) -> TableModel:
    def table(history: History) -> list[float]:
        if history[0] == 4 and len(history) >= length:
            raise TroubleError
        return PAIR.target(history)

    return TableModel(table, 5)


def ends_of(outputs: list[StepOutput], request_id: str) -> list[tuple[int, int | None, str | None]]:
    return [(each.index, each.token, each.finish_reason) for each in outputs if each.request_id == request_id]


def assert_failed(rig: Rig, outputs: list[StepOutput]) -> None:
    assert ends_of(outputs, "search") == [(index, None, "error") for index in range(3)]
    assert (rig.engine.metrics.failed, rig.engine.metrics.finished) == (3, 1)


def test_an_error_in_a_pass_ends_every_sample() -> None:
    rig = build_rig(failing_at(6), limits=LIMITS)
    rig.expected = TroubleError
    samples = rig.add((4, 1), SEARCH, "search")
    (other,) = rig.add((1, 2), SamplingParams(temperature=0, max_tokens=8), "other")
    assert_failed(rig, rig.finish())
    assert all(isinstance(sample.ending.error, TroubleError) and sample.output == [] for sample in samples)
    assert len(other.output) == 8


@pytest.mark.parametrize("index", range(3))
def test_a_text_error_of_one_sample_ends_all_samples(index: int) -> None:
    """They end together, in one commit."""
    Watch.made = 0
    rig = build_rig(TableModel(PAIR.target, 5), limits=LIMITS)
    rig.expected = TroubleError
    samples = rig.add((4, 1), SEARCH, "search", lambda: Watch(index))
    rig.add((1, 2), SamplingParams(temperature=0, max_tokens=8), "other")
    assert_failed(rig, rig.finish())
    assert [(sample.output, found_by(sample)) for sample in samples] == [([], (None, None))] * 3
    assert [sample.stops.checker.seen for sample in samples] == [[], [], []], "text of tokens that nobody has"


def test_every_sample_s_stop_checker_gets_its_own_tokens() -> None:
    rig = build_rig(TableModel(PAIR.target, 5), limits=LIMITS)
    samples = rig.add((4, 1), SEARCH, stop_checker=Watch)
    rig.finish()
    for sample in samples:
        assert isinstance(sample.stops.checker, Watch)
        assert sample.stops.checker.seen == sample.output


def test_a_sample_without_a_hypothesis_ends_with_an_error() -> None:
    """Two texts are possible and three were requested."""
    rig = build_rig(TableModel(lambda history: [0.0, 0.0] if len(history) == 1 else [0.0, -math.inf], 2), limits=LIMITS)
    rig.expected = RequestError
    samples = rig.add((1,), SEARCH, "search")
    outputs = rig.finish()
    assert [sample.output for sample in samples] == [[0] + [0] * 7, [1] + [0] * 7, []]
    assert "n=3 hypotheses were requested and there are 2" in str(samples[2].ending.error)
    assert ends_of(outputs, "search")[-1] == (2, None, "error")
    assert rig.engine.metrics.finished == 2


def test_a_distribution_without_tokens_ends_every_sample() -> None:
    rig = build_rig(TableModel(lambda history: [-math.inf, -math.inf], 2), limits=LIMITS)
    rig.expected = RequestError
    samples = rig.add((1,), SEARCH, "search")
    assert ends_of(rig.finish(), "search") == [(index, None, "error") for index in range(3)]
    assert all("there are" in str(sample.ending.error) for sample in samples)


def test_a_search_takes_one_place_in_the_queue() -> None:
    rig = build_rig(TableModel(PAIR.target, 5), limits=Limits(32, 1, 48, max_waiting=1))
    rig.add((1,), SEARCH, "first")
    rig.add((2,), SEARCH, "second")
    with pytest.raises(CapacityError):
        rig.add((3,), SEARCH, "third")
    rig.finish()
    assert rig.engine.metrics.prompt_tokens == 2


@pytest.mark.parametrize("max_tokens", [None, 6, 50])
def test_a_search_ends_at_the_end_of_the_context(max_tokens: int | None) -> None:
    rig = build_rig(TableModel(PAIR.target, 5), limits=Limits(12, 1, 48))
    samples = rig.add((1,) * 7, SamplingParams(beam_width=3, n=3, max_tokens=max_tokens))
    rig.finish()
    assert [(len(sample.tokens), sample.ending.reason) for sample in samples] == [(12, "length")] * 3


def test_a_search_returns_the_prompt_s_log_probabilities() -> None:
    rig = build_rig(TableModel(PAIR.target, 5), limits=LIMITS)
    first, *_ = rig.add((1, 2, 0), SamplingParams(beam_width=2, n=2, max_tokens=4, prompt_logprobs=0))
    (plain,) = rig.add((1, 2, 0), SamplingParams(max_tokens=1, prompt_logprobs=0), "plain")
    rig.finish()
    assert first.prompt_logprobs == plain.prompt_logprobs
    assert len(first.prompt_logprobs) == 2
