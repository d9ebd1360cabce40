"""The threads of the native kernels: the same bits for any number, and each calling thread has helpers of its own."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from speculant.kernels import Op, Pass, Type
from speculant.models import linear
from tests.native import needs_kernels, on

pytestmark = needs_kernels
TASKS = "/proc/self/task"  # a folder for each thread
PATIENCE = 20.0  # seconds until a thread that ends has ended


def run_layers(threads: int, layers: int = 20) -> Tensor:
    """Run linear layers on 5 rows, each on the output of the one before, in one call."""
    kernels, generator = on(threads=threads), torch.Generator().manual_seed(0)
    packed = kernels.pack(Type.F32, torch.randn(96, 96, generator=generator) / 96**0.5)
    rows = [torch.randn(5, 96, generator=generator), *(torch.empty(5, 96) for _ in range(layers))]
    ops = [linear(packed, x, out) for x, out in itertools.pairwise(rows)]
    for _ in range(3):
        kernels.run((Op * layers)(*ops), Pass(rows=5))
    return rows[-1]


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return run_layers(1)


@pytest.mark.parametrize("threads", [2, 3, 300])
def test_any_number_of_threads_computes_the_same(expected: Tensor, threads: int) -> None:
    assert torch.equal(run_layers(threads), expected)


def test_several_threads_may_call_at_once(expected: Tensor) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(run_layers, [2, 3, 4, 2, 3, 4, 2, 3]))


@pytest.mark.skipif(not os.path.isdir(TASKS), reason="threads are counted in /proc")
def test_helpers_end_with_the_thread_that_they_belong_to() -> None:
    before = set(os.listdir(TASKS))
    seen: list[int] = []

    def call() -> None:
        run_layers(5)
        seen.append(len(set(os.listdir(TASKS)) - before))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join()
    assert seen[0] >= 5  # the caller and four helpers
    deadline = time.monotonic() + PATIENCE
    while set(os.listdir(TASKS)) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(os.listdir(TASKS)) - before


def check_in_child(expected: list[list[float]]) -> None:
    os._exit(0 if run_layers(3).tolist() == expected else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork")
def test_a_forked_process_has_helpers_of_its_own(expected: Tensor) -> None:
    run_layers(3)  # this process's helpers, which the child does not have
    child = multiprocessing.get_context("fork").Process(target=check_in_child, args=(expected.tolist(),))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
