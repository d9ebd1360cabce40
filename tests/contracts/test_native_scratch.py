"""Scratch memory of the native kernels: none of it is on a stack, and what is kept has a bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from speculant.kernels.native import MOST_DIM, MOST_GROUP, usable_sets

pytestmark = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")
ROOT = Path(__file__).parents[2]

# A program of its own per test: the limit of a stack holds for threads that start behind it, peak memory for a process.
SETUP = f"""
import resource
from speculant.kernels.native import Type, open_kernels
from tests.contracts.test_native_attention import WIDE, Attention, Rows, Shape, expected, make
MOST_DIM, MOST_GROUP = {MOST_DIM}, {MOST_GROUP}
"""
LARGEST = (
    SETUP
    + """
for type_ in (Type.F32, Type.BF16):
    for dim in (MOST_DIM, MOST_DIM - 1):
        shape = Shape(heads=MOST_GROUP, kv_heads=1, dim=dim, type=type_)
        for rows in (Rows(0, 90), Rows(700, 1), Rows(500, 3, WIDE)):  # in one span; split into spans; with a tree
            attention = Attention(shape, [fed := make(shape, rows)])
            (alone,), (seen,) = (attention.run(open_kernels(SET, threads)) for threads in (1, 2))
            assert seen.equal(alone)
            if not rows.parents:
                assert (seen - expected(shape, fed)).abs().max() < 1e-3
print("done")
"""
)
LONG = (
    SETUP
    + """
shape = Shape(heads=32, kv_heads=1, dim=64, window=64)
attention = Attention(shape, [make(shape, Rows(START, 256))])
kernels = open_kernels(SET, 16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attention.run(kernels)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
)


def run(program: str, isa: str, stack: str = "unlimited", **values: object) -> str:
    """Run a program with a limit of the stack in KiB; return what it prints."""
    given = "".join(f"{name} = {value!r}\n" for name, value in {"SET": isa, **values}.items())
    command = ["bash", "-c", f'ulimit -s {stack} && exec "$0" -c "$1"', sys.executable, given + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


@pytest.mark.parametrize("isa", usable_sets())
def test_the_largest_attention_needs_no_large_stack(isa: str) -> None:
    assert run(LARGEST, isa, stack="512") == "done"


@pytest.mark.parametrize("isa", usable_sets())
def test_scratch_of_attention_does_not_grow_with_the_context(isa: str) -> None:
    """Softmaxes of every row, head and span of 64 Ki positions would take 277 MiB."""
    assert int(run(LONG, isa, START=2**16)) < 80 * 1024
