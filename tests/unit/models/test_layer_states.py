"""The memory that hidden states are written to, and rows of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.drafting.heads.hidden import Pending
from speculant.models.native.program import TAPPED_ROWS, TapMemory
from speculant.types import LayerStates, state_rows

WIDTH = 3


def fill(addresses: list[int], rows: int, value: float) -> None:
    """Write as a pass does: from the address of each layer's first row on."""
    for layer, address in enumerate(addresses):
        floats = (ctypes.c_float * (rows * WIDTH)).from_address(address)
        floats[:] = [value + 100 * layer] * (rows * WIDTH)


def values(states: LayerStates) -> list[list[float]]:
    return [layer[:, 0].tolist() for layer in states]


def test_no_row_is_written_twice() -> None:
    """Rows of earlier passes stay as they are, even if memory is allocated anew."""
    memory, taken = TapMemory(2, WIDTH), list[LayerStates]()
    sizes = (1, 5, TAPPED_ROWS, 3, TAPPED_ROWS + 7, 1)
    for index, rows in enumerate(sizes):
        states, addresses = memory.take(rows)
        fill(addresses, rows, index)
        taken.append(states)
    assert [values(states) for states in taken] == [
        [[index] * rows, [100 + index] * rows] for index, rows in enumerate(sizes)
    ]


def test_states_are_read_as_tensors_of_each_layer() -> None:
    rows = torch.arange(2 * 6 * WIDTH, dtype=torch.float32).view(2, 6, WIDTH)
    states = LayerStates(rows, 1, 5)
    assert len(states) == 2
    assert all(torch.equal(own, layer[1:5]) for own, layer in zip(states, rows, strict=True))
    assert torch.equal(states[-1], rows[1, 1:5])
    assert torch.equal(states[1:][0], rows[1, 1:5])
    with pytest.raises(IndexError):
        states[2]


def test_rows_of_states_are_those_of_each_layer() -> None:
    rows = torch.arange(2 * 6 * WIDTH, dtype=torch.float32).view(2, 6, WIDTH)
    for layers in (LayerStates(rows, 1, 6), tuple(rows[:, 1:6])):
        part = state_rows(layers, 2, 4)
        assert [states.tolist() for states in part] == rows[:, 3:5].tolist()


def test_states_grow_by_the_next_rows_alone() -> None:
    rows = torch.zeros(1, 6, WIDTH)
    states = LayerStates(rows, 0, 2)
    assert not states.grow(LayerStates(rows, 3, 4))
    assert not states.grow(LayerStates(rows.clone(), 2, 4))
    assert states.grow(LayerStates(rows, 2, 5))
    assert (states.first, states.end) == (0, 5)


def test_waiting_states_are_one_range_of_memory() -> None:
    """States of successive passes are one part. Others stay as they were handed out."""
    memory, encoded = TapMemory(1, WIDTH), list[int]()

    def encode(layers: Sequence[Tensor]) -> Tensor:
        encoded.append(len(layers[0]))
        return layers[0]

    pending = Pending(encode)
    first, addresses = memory.take(2)
    fill(addresses, 2, 1)
    pending.add(first, 2)
    second, addresses = memory.take(3)
    fill(addresses, 3, 2)
    pending.add(second.part(0, 2), 2)  # the last row was not committed
    third, addresses = memory.take(1)
    fill(addresses, 1, 3)
    pending.add(third, 1)
    assert len(first[0]) == 2
    assert pending.read()[:, 0].tolist() == [1, 1, 2, 2, 3]
    assert encoded == [5]
