"""An engine's figures of itself: its queue, its memory and its totals."""

from __future__ import annotations

import pytest

from speculant.config import Limits
from speculant.errors import CapacityError
from speculant.lab.exactness import History, TableModel
from speculant.params import SamplingParams
from tests.fakes import (
    BLOCK,
    MakeCache,
    Rig,
    both_caches,
    build_rig,
    few_blocks,
    model_drafter,
)

V = 5
LIMITS = Limits(max_model_len=24, max_num_seqs=2, max_num_batched_tokens=32, max_waiting=1)
PARAMS = SamplingParams(temperature=0, max_tokens=6)


def counting(history: History) -> list[float]:
    return [4.0 * (token == (history[-1] + 1) % V) for token in range(V)]


def rig_of(cache: MakeCache, draft_cache: MakeCache | None = None, limits: Limits = LIMITS) -> Rig:
    drafter = model_drafter(TableModel(counting, V), V, limits=limits, cache=draft_cache) if draft_cache else None
    return build_rig(TableModel(counting, V), drafter, length=2, limits=limits, cache=cache)


def test_a_full_queue_refuses_and_nothing_of_the_request_stays() -> None:
    rig = rig_of(few_blocks(12))
    for name in "abc":
        rig.add((0,), PARAMS, name)
    assert not rig.engine.accepts(1)
    with pytest.raises(CapacityError, match="max_num_seqs . max_waiting is 3") as caught:
        rig.add((0,), PARAMS, "d")
    assert "raise max_waiting" in caught.value.fix
    assert [output.request_id for output in rig.step()] == ["a", "b"]
    assert not rig.engine.accepts(1)
    rig.engine.abort("a")
    assert rig.engine.accepts(1)
    assert not rig.engine.accepts(2)
    assert rig.add((0,), PARAMS, "d"), "its id was not taken"
    rig.finish()


def test_samples_are_refused_together() -> None:
    rig = rig_of(few_blocks(12))
    with pytest.raises(CapacityError, match="4 sequences come together"):
        rig.add((0,), SamplingParams(n=4), "a")
    assert not rig.engine.has_unfinished()
    assert rig.engine.accepts(3)


def test_a_lower_priority_is_served_sooner() -> None:
    rig = rig_of(few_blocks(12), limits=Limits(24, 1, 32))
    for name, priority in (("low", 5), ("middle", 0), ("high", -5)):
        rig.add((0,), PARAMS, name, priority=priority)
    ends = [output.request_id for output in rig.finish() if output.finish_reason]
    assert ends == ["high", "middle", "low"]


@both_caches
def test_free_memory_is_that_of_the_fullest_cache(cache: MakeCache) -> None:
    roomy, tight = rig_of(cache), rig_of(few_blocks(40), few_blocks(12))
    assert roomy.engine.free_kv_tokens() == 48
    assert tight.engine.free_kv_tokens() == 12 * BLOCK
    tight.add((0, 1, 2), PARAMS)
    tight.step()
    assert tight.engine.free_kv_tokens() == 12 * BLOCK, "the draft model begins with the first draft"
    tight.step()
    assert tight.engine.free_kv_tokens() == (12 - 2) * BLOCK
    tight.finish()
    assert tight.engine.free_kv_tokens() == 12 * BLOCK


def test_requests_are_counted_by_how_they_ended() -> None:
    rig = rig_of(few_blocks(12))
    rig.add((0, 1, 2, 3, 4), PARAMS, "a")
    rig.add((0, 1), SamplingParams(n=2), "b")
    rig.step()
    rig.abort("b")
    rig.finish()
    rig.add((0, 1, 2, 3, 4), PARAMS, "c")
    rig.finish()
    metrics = rig.engine.metrics
    assert (metrics.finished, metrics.aborted, metrics.failed) == (2, 2, 0)
    assert (metrics.prompt_tokens, metrics.prefix_hit_tokens) == (5 + 2 + 2 + 5, 4)
    assert metrics.tokens == 6 + 1 + 6


def test_metrics_have_the_engine_s_state_after_a_step() -> None:
    rig = rig_of(few_blocks(12))
    for name in "abc":
        rig.add((0, 1, 2, 3, 4), PARAMS, name)
    rig.step()
    metrics = rig.engine.metrics
    assert (metrics.running, metrics.waiting) == (2, 1)
    assert (metrics.blocks_used, metrics.blocks_total) == (3, 12), "the first block is shared"
    rig.abort("b")
    assert (metrics.running, metrics.waiting, metrics.blocks_used) == (1, 1, 2), "without another step"
    rig.finish()
    assert (metrics.running, metrics.waiting, metrics.blocks_used) == (0, 0, 0)
    assert metrics.preemptions == 0


def test_preemptions_are_counted() -> None:
    rig = rig_of(few_blocks(7))
    requests = [rig.add((i,), SamplingParams(temperature=0, max_tokens=20), str(i))[0] for i in range(2)]
    rig.finish()
    assert [request.metrics.num_preemptions for request in requests] == [0, 1]
    assert rig.engine.metrics.preemptions == 1
