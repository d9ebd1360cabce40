"""A batch is plain data, and all that a model needs."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch

from speculant.cache.base import CacheShape
from speculant.cache.paged import KVCache
from speculant.cache.storage import paged_cache, slotted_cache
from speculant.models.base import Batch, SequenceInput, build_batch
from speculant.models.weights.load import load_model
from speculant.types import DraftTree
from tests.models import Checkpoints

CPU = torch.device("cpu")
TREE = DraftTree.of([5, 6, 7], [-1, -1, 1], torch.rand(3, 96))
FEEDS = [
    SequenceInput(1, [1, 2], TREE),
    SequenceInput(2, [3], DraftTree.chain([4])),
    SequenceInput(3, [9], DraftTree.empty()),
]


SHAPE = CacheShape(2, 2, 8, torch.float32, CPU)  # of the small checkpoints


@pytest.fixture(params=["paged", "slotted"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    return paged_cache(SHAPE, 16, 4) if request.param == "paged" else slotted_cache(SHAPE, 4, 16)


def test_segments_have_the_reserved_slots(cache: KVCache) -> None:
    cache.reserve(2, 5)
    batch = build_batch(FEEDS, cache, CPU)
    assert [(each.seq_id, each.start, each.num_rows, each.end) for each in batch.segments] == [
        (1, 0, 5, 5), (2, 5, 2, 7), (3, 0, 1, 1)
    ]  # fmt: skip
    assert [list(each.parents) for each in batch.segments] == [[-1, -1, 1], [-1], []]
    assert [each.is_chain for each in batch.segments] == [False, True, True]
    assert [each.num_committed for each in batch.segments] == [2, 1, 1]
    assert [each.table for each in batch.segments] == [cache.table(seq_id) for seq_id in (1, 2, 3)]
    assert batch.block_size == cache.block_size
    slots = [
        each.table[position // batch.block_size] * batch.block_size + position % batch.block_size
        for each in batch.segments
        for position in range(each.start, each.end)
    ]
    assert batch.slot_mapping.tolist() == slots


def pickled(batch: Batch) -> Batch:
    copy: Batch = pickle.loads(pickle.dumps(batch))
    return copy


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("sent", [pickled, lambda batch: batch], ids=["sent", "kept"])
@torch.inference_mode()
def test_a_batch_is_whole_without_its_tables(
    cache: KVCache, checkpoints: Checkpoints, sent: Callable[[Batch], Batch], kernels: str
) -> None:
    """A pass needs the batch and the storage; later changes of the tables have no effect."""
    model = load_model(checkpoints.target, "float32", kernels=kernels).model
    first = build_batch([SequenceInput(2, [1, 2, 3, 4, 5], DraftTree.empty())], cache, CPU)
    model.forward(first, cache.storage)
    batch = build_batch(FEEDS, cache, CPU)
    expected = model.forward(batch, cache.storage).last
    data = sent(batch)
    for seq_id in (1, 2, 3):
        cache.release(seq_id)
    assert torch.equal(model.forward(data, cache.storage).last, expected)


def test_pickled_batches_leave_distributions_behind(cache: KVCache) -> None:
    wide = DraftTree.of([5, 6, 7], [-1, -1, 1], torch.rand(3, 100_000))
    batch = build_batch([SequenceInput(1, [1], wide)], cache, CPU)
    assert len(pickle.dumps(batch)) < 10_000
