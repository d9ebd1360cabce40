"""Memory that is used again must never be used twice at a time."""

from __future__ import annotations

import threading

import pytest
import torch

from speculant.kernels import LEAST_BYTES, Scratch, native as native_module

ROWS, WIDTH = 40, 8192  # 2.6 MB of float64


def test_scratch_uses_freed_memory_again() -> None:
    memory = Scratch()
    first = memory.empty(ROWS, WIDTH, dtype=torch.float64)
    address = first.data_ptr()
    assert (first.shape, first.dtype, address % 64) == ((ROWS, WIDTH), torch.float64, 0)
    del first
    assert memory.empty(ROWS - 1, WIDTH, dtype=torch.float64).data_ptr() == address


@torch.inference_mode()
def test_scratch_spares_memory_with_a_view_left() -> None:
    memory = Scratch()
    first = memory.empty(ROWS, WIDTH, dtype=torch.float64)
    address, row = first.data_ptr(), first[3:4].view(-1)
    del first
    row.fill_(7.0)
    memory.empty(ROWS, WIDTH, dtype=torch.float64).zero_()
    assert (row == 7.0).all()
    del row
    assert memory.empty(ROWS, WIDTH, dtype=torch.float64).data_ptr() == address


def test_scratch_keeps_no_small_tensors() -> None:
    memory = Scratch()
    memory.empty(LEAST_BYTES // 4 - 1, dtype=torch.float32)
    assert not memory._kept


def test_scratch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_module, "MOST_BYTES", 2 * LEAST_BYTES)
    memory = Scratch()
    held = [memory.empty(LEAST_BYTES // 4, dtype=torch.float32) for _ in range(5)]
    assert memory._kept == 2 * LEAST_BYTES
    assert len({each.data_ptr() for each in held}) == 5


def test_scratch_is_shared_by_threads() -> None:
    memory, wrong = Scratch(), list[int]()

    def use(value: int) -> None:
        for _ in range(200):
            own = memory.empty(LEAST_BYTES // 4, dtype=torch.float32).fill_(value)
            wrong.extend([value] * (not bool((own == value).all())))

    threads = [threading.Thread(target=use, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
