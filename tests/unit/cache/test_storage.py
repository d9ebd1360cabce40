"""Tensors by slot: written values are read back, and moved as if all at once."""

from __future__ import annotations

import pytest
import torch

from speculant.cache.base import CacheShape, LayerShape, Moves
from speculant.cache.storage import TensorStorage, paged_cache
from speculant.errors import CapacityError
from tests.caches import SHAPE, contents


def storage_of(tokens: list[int]) -> TensorStorage:
    storage = TensorStorage(SHAPE, len(tokens), "lower the test's size.")
    for layer in range(SHAPE.num_layers):
        storage.write(layer, torch.arange(len(tokens)), *contents(tokens, layer))
    return storage


def assert_stored(storage: TensorStorage, slots: torch.Tensor | slice, tokens: list[int]) -> None:
    for layer in range(SHAPE.num_layers):
        for found, expected in zip(storage.read(layer, slots), contents(tokens, layer), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("slots", [slice(1, 4), torch.tensor([1, 2, 3])], ids=["slice", "tensor"])
def test_storage_reads_slots_in_order(slots: torch.Tensor | slice) -> None:
    assert_stored(storage_of([5, 6, 7, 8, 9]), slots, [6, 7, 8])


def test_storage_reads_consecutive_slots_in_place() -> None:
    storage = storage_of([5, 6, 7])
    assert storage.read(0, slice(1, 3))[0].data_ptr() == storage.layer(0)[0][1].data_ptr()


@pytest.mark.parametrize(
    ("sources", "targets", "after"),
    [
        ([1, 2, 4], [0, 1, 2], [6, 7, 9, 8, 9]),
        ([0, 1, 2], [1, 2, 3], [5, 5, 6, 7, 9]),
        ([0, 4], [4, 0], [9, 6, 7, 8, 5]),
        (range(2), range(3, 5), [5, 6, 7, 5, 6]),
        ([2, 2], [0, 1], [7, 7, 7, 8, 9]),
    ],
    ids=["down", "up", "swap", "ranges", "one source"],
)
def test_moves_read_all_sources_first(sources: list[int], targets: list[int], after: list[int]) -> None:
    storage = storage_of([5, 6, 7, 8, 9])
    storage.move(Moves(sources, targets))
    assert_stored(storage, slice(0, 5), after)


MIXED = CacheShape(
    5, 2, 3, torch.float64, torch.device("cpu"), (6, None, 6, None, None),
    (LayerShape(2, 3), LayerShape(1, 5), LayerShape(2, 3, 0), LayerShape(1, 5, 1), LayerShape(4, 5)),
)  # fmt: skip


@pytest.mark.parametrize("counts", [7, [7, 6]], ids=["one group", "groups"])
def test_layers_have_their_own_heads_or_read_an_earlier_one(counts: int | list[int]) -> None:
    storage = TensorStorage(MIXED, counts, "lower the test's size.")
    own = {0: (2, 3), 1: (1, 5), 4: (4, 5)}
    numbers = {layer: torch.randn(2, 6, *size, dtype=torch.float64) for layer, size in own.items()}
    for layer, (keys, values) in numbers.items():
        storage.write(layer, torch.arange(6), keys, values)
    moves = [[0, 1, 2], [3, 4, 5]], [[0, 4], [4, 0]]
    storage.move(Moves(*moves[0]) if isinstance(counts, int) else Moves(*moves[0], (Moves(*moves[1]),)))
    for layer, read in enumerate([0, 1, 0, 1, 4]):
        sources, targets = moves[1 if read == 0 and not isinstance(counts, int) else 0]
        expected = numbers[read].clone()
        expected[:, targets] = numbers[read][:, sources]
        assert torch.equal(torch.stack(storage.read(layer, slice(0, 6))), expected)
        assert storage.layer(layer)[0].data_ptr() == storage.layer(read)[0].data_ptr()


def test_layers_that_read_an_earlier_one_take_no_memory() -> None:
    assert MIXED.bytes_per_token == 8 * 2 * (2 * 3 + 5 + 4 * 5)
    assert [MIXED.bytes_of(group.layers) for group in MIXED.groups] == [8 * 2 * 25, 8 * 2 * 6]
    with pytest.raises(ValueError, match="2 shapes for 1 layers"):
        CacheShape(1, 2, 3, torch.float64, torch.device("cpu"), own=(LayerShape(2, 3),) * 2)


def test_paged_memory_that_does_not_fit_names_a_fix() -> None:
    huge = CacheShape(1000, 1000, 1000, torch.float64, torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"238418579101.56 GiB for 16000000000 .*\n.*Fix: lower kv_memory"):
        paged_cache(huge, 1_000_000_000, 16)
