"""Commit: tokens up to the first stop, and everything else agrees with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speculant.cache import CacheShape, KVCache, slotted_cache
from speculant.engine import Committed, TargetOutput, fail, record_prompt, roll_back, token_logprobs
from speculant.engine.commit import commit
from speculant.lab.exactness import TableModel
from speculant.params import SamplingParams
from speculant.scheduling import Scheduled
from speculant.types import DraftTree, Request, Verdict
from tests.caches import read
from tests.models import make_request

PROMPT = [1, 2, 3]
TREE = DraftTree(torch.tensor([10, 11, 12, 13, 14]), torch.tensor([-1, -1, 1, 2, 2]))  # 11 -> 12 -> 13 or 14
SHAPE = CacheShape(1, 1, 1, torch.float64, torch.device("cpu"))


@dataclass
class Watch:
    """Reports a stop string when the given tokens have been seen."""

    stop: Sequence[int]
    seen: list[int] = field(default_factory=list)
    saved: int = 0

    def push(self, token: int) -> str | None:
        self.seen.append(token)
        return "STOP" if self.seen[-len(self.stop) :] == list(self.stop) else None

    def push_end(self, token: int) -> None:
        self.seen.append(token)

    def checkpoint(self) -> None:
        self.saved = len(self.seen)

    def rollback(self) -> None:
        del self.seen[self.saved :]


def random_logits(rows: int) -> Tensor:
    """Return the same logits [rows, 20] every time, no two rows alike."""
    return torch.randn(rows, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@dataclass
class Round:
    """One verification of a request: cache, rows and all."""

    request: Request
    tree: DraftTree
    cache: KVCache

    def commit(self, path: tuple[int, ...], token: int, max_model_len: int = 100, now: float = 1.0) -> Committed:
        logits = random_logits(self.tree.size + 1)
        item = Scheduled(self.request, len(self.request.tokens) - 1, 1)
        fed = TargetOutput(item, self.tree, logits, None, nodes=range(-1, self.tree.size))
        return commit(fed, Verdict(path, token), self.cache, max_model_len, now)


def a_round(tree: DraftTree = TREE, output: Sequence[int] = (), **fields: Any) -> Round:
    """Set up the state after a pass: root and draft nodes in the cache, the row number as content."""
    params = fields.pop("params", SamplingParams(max_tokens=50))
    request = make_request(PROMPT, output, params, **fields)
    cache = slotted_cache(SHAPE, 1, 100)
    slots = cache.reserve(request.seq_id, len(request.tokens) + tree.size)
    marks = torch.arange(len(slots.slots), dtype=torch.float64).view(-1, 1, 1)
    cache.storage.write(0, torch.tensor(slots.slots), marks, marks)
    return Round(request, tree, cache)


def held(a: Round) -> list[int]:
    return [int(mark) for mark in read(a.cache, 0, a.request.seq_id)[0].flatten().tolist()]


def test_the_accepted_path_and_the_next_token_are_appended() -> None:
    a = a_round()
    committed = a.commit((1, 2, 4), 7)
    assert a.request.tokens == [*PROMPT, 11, 12, 14, 7]
    assert committed.tokens == [11, 12, 14, 7]
    assert [output.token for output in committed.outputs] == [11, 12, 14, 7]
    assert [output.drafted for output in committed.outputs] == [True, True, True, False]
    assert not any(output.corrected for output in committed.outputs), "nothing was drafted behind the leaf"
    assert all(output.finish_reason is None and output.acceptance_rate is None for output in committed.outputs)
    assert held(a) == [0, 1, 2, 4, 5, 7], "the accepted nodes move up, the newest token is not held"
    assert a.request.rounds == 1


def test_a_rejected_draft_leaves_the_correction_alone() -> None:
    a = a_round()
    committed = a.commit((), 7)
    assert a.request.tokens == [*PROMPT, 7]
    assert [(output.drafted, output.corrected) for output in committed.outputs] == [(False, True)]
    assert committed.outputs[0].rejected == (10, 11), "both children of the root were tested, in this order"
    assert held(a) == [0, 1, 2]


@pytest.mark.parametrize("end", [11, 12, 14, 7])
def test_tokens_after_an_end_token_are_dropped_everywhere(end: int) -> None:
    a = a_round(params=SamplingParams(logprobs=0, max_tokens=50), end_token_ids=frozenset({end}))
    committed = a.commit((1, 2, 4), 7)
    said = [11, 12, 14, 7][: [11, 12, 14, 7].index(end) + 1]
    assert a.request.output == committed.tokens == [output.token for output in committed.outputs] == said
    assert (a.request.ending.reason, a.request.ending.stop) == ("stop", None)
    assert len(a.request.logprobs) == a.request.metrics.timing.num_tokens == len(said)
    assert len(held(a)) == len(a.request.tokens) - 1
    assert committed.outputs[-1].finish_reason == "stop"


def test_a_stop_string_ends_a_request_within_a_run() -> None:
    stop_checker = Watch(stop=[12])
    a = a_round(checker=stop_checker)
    a.commit((1, 2, 4), 7)
    assert (a.request.output, a.request.ending.reason, a.request.ending.stop) == ([11, 12], "stop", "STOP")
    assert stop_checker.seen == [11, 12]


def test_a_stop_string_can_span_verifications() -> None:
    a = a_round(output=[9], checker=Watch(stop=[9, 11], seen=[9]))
    a.commit((1, 2), 7)
    assert (a.request.output, a.request.ending.stop) == ([9, 11], "STOP")


def test_a_stop_at_the_last_allowed_token_is_a_stop() -> None:
    for fields in ({"end_token_ids": frozenset({12})}, {"checker": Watch(stop=[12])}):
        a = a_round(params=SamplingParams(max_tokens=2), **fields)
        a.commit((1, 2, 4), 7)
        assert (a.request.output, a.request.ending.reason) == ([11, 12], "stop")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_max_tokens_is_never_overshot(max_tokens: int) -> None:
    a = a_round(params=SamplingParams(max_tokens=max_tokens))
    a.commit((1, 2, 4), 7)
    assert (a.request.num_output, a.request.ending.reason, a.request.ending.stop) == (max_tokens, "length", None)


@pytest.mark.parametrize("max_model_len", [4, 5, 6])
def test_the_context_is_never_overshot(max_model_len: int) -> None:
    a = a_round()
    a.commit((1, 2, 4), 7, max_model_len=max_model_len)
    assert (len(a.request.tokens), a.request.ending.reason) == (max_model_len, "length")


def test_ends_below_min_tokens_do_not_end() -> None:
    params = SamplingParams(min_tokens=3, max_tokens=50)
    a = a_round(params=params, end_token_ids=frozenset({11, 14}))
    a.commit((1, 2, 4), 7)
    assert (a.request.output, a.request.ending.reason) == ([11, 12, 14], "stop")


@pytest.mark.parametrize(
    ("path", "token", "ends", "expected"),
    [  # drafted, accepted, tested
        ((), 7, (), (5, 0, 1)),
        ((1,), 7, (), (5, 1, 2)),
        ((1, 2), 7, (), (5, 2, 3)),
        ((1, 2, 4), 7, (), (5, 3, 3)),  # a leaf: what follows was not drafted
        ((1, 2, 4), 7, (12,), (5, 2, 2)),  # the third was accepted and then dropped
        ((1, 2), 7, (11,), (5, 1, 1)),
    ],
)
def test_counts_of_a_verification(
    path: tuple[int, ...], token: int, ends: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    a = a_round(end_token_ids=frozenset(ends))
    a.commit(path, token)
    counted = a.request.metrics.speculative_decoding
    assert (counted.num_draft_tokens, counted.num_accepted_draft_tokens, counted.num_tested_tokens) == expected
    assert counted.acceptance_histogram[expected[1]] == counted.num_spec_steps == 1


def test_a_plain_step_is_not_counted_as_speculative() -> None:
    a = a_round(tree=DraftTree.empty())
    a.commit((), 7)
    assert a.request.metrics.speculative_decoding.num_spec_steps == 0
    assert a.request.metrics.speculative_decoding.acceptance_histogram == []


def test_the_last_output_tells_the_acceptance_rate() -> None:
    a = a_round(end_token_ids=frozenset({7}))
    outputs = a.commit((1, 2), 7).outputs
    assert [output.acceptance_rate for output in outputs] == [None, None, 2 / 5]


def test_a_token_s_log_probability_is_from_the_row_before_it() -> None:
    """V 34497: rows are the root's and then those of the accepted nodes, not the first ones."""
    a = a_round(params=SamplingParams(logprobs=1, max_tokens=50))
    a.commit((1, 2, 4), 7)
    table = torch.log_softmax(random_logits(6), -1)
    for entry, token, row in zip(a.request.logprobs, [11, 12, 14, 7], [0, 2, 3, 5], strict=True):
        best = int(table[row].argmax())
        assert set(entry) == {token, best}
        assert entry[token].logprob == pytest.approx(float(table[row, token]), abs=1e-12)
        assert (entry[token].rank, entry[best].rank) == (1 + int((table[row] > table[row, token]).sum()), 1)


def test_log_probabilities_are_recorded_only_on_request() -> None:
    a = a_round()
    a.commit((1, 2), 7)
    assert a.request.logprobs == []


def test_logprobs_are_the_model_s_and_ranks_start_at_one() -> None:
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf], [1.0, 1.0, 1.0]])
    first, second = token_logprobs(logits, [0, 2], 2)
    assert {token: (entry.rank, round(math.exp(entry.logprob), 6)) for token, entry in first.items()} == {
        1: (1, 0.75),
        0: (2, 0.25),
    }
    assert second[2].rank == 1
    assert second[2].logprob == pytest.approx(-math.log(3))


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 4), [2], 100)
    assert set(entry) == {0, 1, 2, 3}


def test_prompt_logprobs_are_those_of_the_next_prompt_token() -> None:
    request = make_request([3, 1, 2, 0], params=SamplingParams(prompt_logprobs=0))
    logits = torch.randn(3, 5, dtype=torch.float64)
    model = TableModel(lambda history: (), 5)  # its hidden states are the logits
    record_prompt(request, logits[:2], model)
    record_prompt(request, logits[2:], model)
    table = torch.log_softmax(logits, -1)
    assert [list(entry) for entry in request.prompt_logprobs] == [[1], [2], [0]]
    values = [entry.logprob for each in request.prompt_logprobs for entry in each.values()]
    assert values == pytest.approx([float(table[0, 1]), float(table[1, 2]), float(table[2, 0])])


def test_a_failure_ends_a_request_and_keeps_its_earlier_tokens() -> None:
    request, error = make_request(PROMPT, [9, 8]), ValueError("bad luck")
    request.metrics.speculative_decoding.record(4, 1, 2)
    (told,) = fail(request, error).outputs
    assert (told.token, told.finish_reason, told.acceptance_rate) == (None, "error", 0.25)
    assert (request.output, request.ending.reason, request.ending.error) == ([9, 8], "error", error)


def test_tokens_without_an_output_are_rolled_back() -> None:
    a = a_round(output=[9], params=SamplingParams(logprobs=0, max_tokens=50), end_token_ids=frozenset({14}))
    a.request.logprobs = [{}]
    stop_checker = Watch(stop=[20], seen=[9], saved=1)
    a.request.stops = replace(a.request.stops, checker=stop_checker)
    a.commit((1, 2, 4), 7)
    roll_back(a.request, 1)
    assert (a.request.tokens, a.request.logprobs, a.request.ending.stop) == ([*PROMPT, 9], [{}], None)
    assert stop_checker.seen == [9]
