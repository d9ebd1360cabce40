"""Beam search finds the beams and scores of the plain search in any batch and in any chunks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from speculant.config import Limits
from speculant.errors import RequestError
from speculant.lab.exactness import FULL_SUPPORT, Pair, TableModel
from speculant.metrics import RequestMetrics
from speculant.params import SamplingParams
from speculant.types import CommittedRows, DraftTree, Request
from tests.beams import beams_of, found_by, texts_of
from tests.exactness.plain_beams import edited_distribution, every_text, exact_distribution, plain_beams
from tests.exactness.searches import (
    CROWD_ENDS,
    CROWDED,
    PROMPT,
    add_crowd,
    assert_found,
    one_at_a_time,
    searched,
    told,
    wide,
)
from tests.examples import examples
from tests.fakes import MakeCache, ScriptedDrafter, both_caches, build_rig, few_blocks, paged, slotted

NOTHING: frozenset[int] = frozenset()
ROOMY = Limits(max_model_len=24, max_num_seqs=3, max_num_batched_tokens=64)
WIDTHS = (1, 2, 3, 5)
LENGTHS = (1, 2, 4, 7)
ENDS = (NOTHING, frozenset({0}), frozenset({0, 2}))
PENALTIES = (-1.0, 0.6, 2.0, 0.0, 1.0)[: examples(5, least=2)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_beams_are_those_of_the_plain_search(seed: int, ends: frozenset[int]) -> None:
    """Distributions with zeros, ties and certainties, more beams than texts, penalties of both signs."""
    pair = Pair(seed, 3 + seed % 2)
    distribution = exact_distribution(pair.target)
    rig = build_rig(TableModel(pair.target, pair.vocab_size), limits=ROOMY, ends=ends)
    rig.expected = RequestError
    for width, longest, penalty in itertools.product(WIDTHS, LENGTHS, PENALTIES):
        requests = searched(rig, wide(width, longest, length_penalty=penalty))
        assert_found(requests, plain_beams(distribution, PROMPT, width, longest, ends, penalty))


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("longest", [1, 3])
def test_a_beam_that_holds_everything_finds_the_best_text(longest: int, ends: frozenset[int]) -> None:
    pair = Pair(9, 3, FULL_SUPPORT)
    texts = sorted(every_text(exact_distribution(pair.target), PROMPT, longest, ends), key=lambda found: -found.score)
    rig = build_rig(TableModel(pair.target, 3), limits=Limits(24, 1, 64), ends=ends)
    requests = searched(rig, wide(len(texts), longest))
    assert {tuple(request.output) for request in requests} == {found.text for found in texts}
    assert [found_by(request)[1] for request in requests] == pytest.approx([found.score for found in texts])


def test_one_beam_is_greedy_decoding() -> None:
    pair = Pair(3, 5, FULL_SUPPORT)
    rig = build_rig(TableModel(pair.target, 5), limits=ROOMY, ends=frozenset({0}))
    (beam,) = searched(rig, SamplingParams(beam_width=1, max_tokens=12))
    (greedy,) = searched(rig, SamplingParams(temperature=0, max_tokens=12))
    assert (beam.output, beam.ending.reason) == (greedy.output, greedy.ending.reason)


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"logit_bias": {1: -1.5, 2: 1.0}},
    {"min_tokens": 3},
    {"min_tokens": 2, "repetition_penalty": 0.7, "frequency_penalty": 0.5, "logit_bias": {0: 2.0}},
    {"temperature": 0, "seed": 5},
]


@pytest.mark.parametrize("edits", EDITS, ids=str)
def test_each_hypothesis_has_its_own_history(edits: dict[str, Any]) -> None:
    pair, ends = Pair(5, 4, ("dense",)), frozenset({0})
    params = wide(4, 6, **edits)
    distribution = edited_distribution(pair, dataclasses.replace(params, temperature=1.0), len(PROMPT), ends)
    rig = build_rig(TableModel(pair.target, 4), limits=ROOMY, ends=ends)
    assert_found(searched(rig, params), plain_beams(distribution, PROMPT, 4, 6, ends))


BUDGETS = (1, 2, 4, 7, 64)


@pytest.mark.covering(1)
@both_caches
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_search_is_the_same_in_parts(cache: MakeCache, budget: int) -> None:
    """A pass without room for all hypotheses scores some, one without room for a whole text feeds it in chunks."""
    prompt, ends = (2, 1, 0, 1, 1), frozenset({3})
    for seed in range(6):
        pair, target = Pair(seed, 4, FULL_SUPPORT), TableModel(Pair(seed, 4, FULL_SUPPORT).target, 4)
        rig = build_rig(target, limits=Limits(10, 1, budget), ends=ends, cache=cache)
        requests = searched(rig, wide(4, None), prompt)
        assert_found(requests, plain_beams(exact_distribution(pair.target), prompt, 4, 5, ends))
        assert max(target.num_rows) <= budget


def test_smaller_parts_take_more_passes() -> None:
    passes = []
    for budget in BUDGETS:
        rig = build_rig(TableModel(Pair(1, 4, FULL_SUPPORT).target, 4), limits=Limits(24, 1, budget))
        passes.append(searched(rig, wide(4, 5))[0].metrics.timing.target_passes)
    assert passes == sorted(set(passes), reverse=True)
    assert passes[-1] == 5


def parting(history: tuple[int, ...]) -> list[float]:
    """Two texts that differ in their first token and stay as likely as each other."""
    return [0.0, 0.0, -9.0] if len(history) == len(PROMPT) else [2.0, -9.0, -9.0]


@pytest.mark.parametrize("budget", [3, 4, 5, 12])
def test_a_search_progresses_beside_others(budget: int) -> None:
    """The hypotheses differ as much as possible, and decoding requests leave them few rows."""
    rig = build_rig(TableModel(parting, 3), limits=Limits(24, 3, budget))
    others = [rig.add((0, index), SamplingParams(temperature=0, max_tokens=16), f"o{index}")[0] for index in range(2)]
    assert_found(searched(rig, wide(2, 8)), plain_beams(exact_distribution(parting), PROMPT, 2, 8))
    assert all(len(other.output) == 16 for other in others)


@both_caches
def test_the_cache_holds_the_trunk_but_for_its_newest_token(cache: MakeCache) -> None:
    rig = build_rig(TableModel(Pair(6, 4, FULL_SUPPORT).target, 4), limits=Limits(90, 1, 64), cache=cache)
    (request,) = rig.add(PROMPT, SamplingParams(beam_width=4, max_tokens=30))
    trunks = []
    while not request.finished:
        rig.step()
        trunks.append(tuple(request.output))
        assert request.finished or rig.cache.length(request.seq_id) == len(request.tokens) - 1
        if not request.finished:
            assert all(text[: len(trunks[-1])] == trunks[-1] for text in texts_of(beams_of(request).live))
    assert len(set(trunks)) > 5, "the hypotheses hardly ever agree: a weak test"


@pytest.mark.parametrize("limits", [Limits(28, 4, 64), Limits(28, 4, 12), Limits(28, 3, 9), Limits(28, 2, 16)], ids=str)
@pytest.mark.parametrize("cache", [paged, slotted, few_blocks(8), few_blocks(9)], ids=["paged", "slotted", "8", "9"])
def test_a_search_beside_others_is_the_same(cache: MakeCache, limits: Limits) -> None:
    """Bit for bit, like the other requests; where memory is short, requests are preempted and resumed."""
    target = TableModel(CROWDED.target, 4)
    rig = build_rig(target, limits=limits, ends=CROWD_ENDS, cache=cache)
    requests = add_crowd(rig)
    rig.finish()
    assert told(requests) == one_at_a_time()
    assert max(target.num_rows) <= limits.max_num_batched_tokens


def test_a_preempted_search_resumes_where_it_was() -> None:
    """Two texts that came before it grow into its memory. The trunk is fed again; the hypotheses were kept."""
    rig = build_rig(TableModel(CROWDED.target, 4), limits=Limits(28, 3, 64), cache=few_blocks(11, keep_prefixes=False))
    for index in range(2):
        rig.add((index,), SamplingParams(temperature=0, max_tokens=22), f"grows {index}")
    requests, rounds = rig.add(PROMPT, wide(3, 16)), set()
    while rig.engine.has_unfinished():
        rig.step()
        rounds.update(beams_of(request).rounds for request in rig.engine._scheduler.waiting if request.search)
    assert_found(requests, plain_beams(exact_distribution(CROWDED.target), PROMPT, 3, 16))
    assert max(rounds) > 2, "no search was set aside in its midst"


def test_streams_get_a_search_at_its_end() -> None:
    rig = build_rig(TableModel(CROWDED.target, 4), limits=ROOMY)
    requests = rig.add(PROMPT, wide(3, 5))
    for _ in range(4):
        assert rig.step() == []
        assert [request.finished for request in requests] == [False] * 3
    outputs = rig.step()
    for request in requests:
        own = [output for output in outputs if output.index == request.index]
        assert [output.token for output in own] == request.output
        assert [output.finish_reason for output in own] == [None] * 4 + ["length"]
    assert rig.engine.metrics.tokens == 15
    assert rig.engine.metrics.finished == 3
    assert not rig.engine.has_unfinished()


def test_an_aborted_search_leaves_nothing() -> None:
    rig = build_rig(TableModel(CROWDED.target, 4), limits=ROOMY)
    requests = rig.add(PROMPT, wide(3, 9), "search")
    (other,) = rig.add(PROMPT, SamplingParams(temperature=0, max_tokens=9), "other")
    for _ in range(3):
        rig.step()
    rig.abort("search")
    assert [request.ending.reason for request in requests] == ["abort"] * 3
    rig.finish()
    assert other.ending.reason == "length"
    assert (rig.engine.metrics.aborted, rig.engine.metrics.finished) == (3, 1)


def test_a_search_takes_one_pass_for_each_token() -> None:
    rig = build_rig(TableModel(CROWDED.target, 4), limits=ROOMY)
    samples = searched(rig, wide(3, 7))
    assert [sample.metrics.timing.target_passes for sample in samples] == [7] * 3, "they come from the same passes"
    assert [sample.metrics.tokens_per_pass for sample in samples] == [len(sample.output) / 7 for sample in samples]
    pooled = RequestMetrics.pooled([sample.metrics for sample in samples])
    assert pooled.timing.target_passes == 7, "a pass is counted once, whatever number of results it has"
    assert pooled.timing.num_tokens == sum(len(sample.output) for sample in samples)
    assert rig.engine.metrics.tokens_per_pass == pooled.tokens_per_pass
    assert samples[0].metrics.verification is None


class Listener(ScriptedDrafter):
    """Asserts that a sequence only grows between its beginning and its end."""

    def __init__(self) -> None:
        super().__init__(lambda request: [])
        self.known: list[int] = []
        self.beginnings = 0

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self.known, self.beginnings = list(request.tokens), self.beginnings + 1

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        assert all(request.tokens == self.known for request in requests), "something changed, and it was not told"
        return super().propose(requests, limits)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""
        self.known += rows.gained
        assert request.tokens == self.known, "not the tokens that it was told"


@pytest.mark.parametrize("budget", [2, 4, 64])
def test_a_drafter_observes_a_change_of_trunk(budget: int) -> None:
    listener = Listener()
    rig = build_rig(TableModel(parting, 3), listener, length=2, limits=Limits(24, 1, budget))
    searched(rig, wide(2, 9))
    assert (listener.beginnings > 1) == (budget < 9)
