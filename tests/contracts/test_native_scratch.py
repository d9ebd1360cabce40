"""Scratch memory of the native kernels: none is on a stack, and the memory that is kept has a bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from speculant.cache import slotted_cache
from speculant.kernels import MOST_DIM, MOST_GROUP, usable_sets
from speculant.models import Decoder, Mlp, NativeDecoder, SequenceInput, build_batch
from speculant.types import DraftTree
from tests.descriptions import describe_pair
from tests.exactness.test_native_decoder import make_native, packed
from tests.native import needs_kernels, on

pytestmark = needs_kernels
measured = pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="sanitizers take memory of their own")
ROOT = Path(__file__).parents[2]

# Programs of their own: the limit of a stack holds for threads that start after it, peak memory for a process. Each
# case is a child of the program, so that one start and its imports serve all of them.
SETUP = f"""
import ctypes, os, resource, torch
from speculant.cache import slotted_cache
from speculant.kernels.native import Type, open_kernels
from tests.contracts.test_native_attention import WIDE, Attention, Rows, Shape, expected, make
MOST_DIM, MOST_GROUP = {MOST_DIM}, {MOST_GROUP}
torch.set_num_threads(1)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def resident():
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed does not count
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024

def in_children(run):
    for case in CASES:
        if os.fork() == 0:
            print(case, run(case), flush=True)
            os._exit(0)
        status = os.wait()[1]
        assert status == 0, (case, status)
"""
LARGEST = (
    SETUP
    + """
shapes = [
    Shape(heads=MOST_GROUP, kv_heads=1, dim=dim, type=type_)
    for type_ in (Type.F32, Type.BF16) for dim in (MOST_DIM, MOST_DIM - 1)
]
spans = (Rows(0, 90), Rows(700, 1), Rows(500, 3, WIDE))  # in one span; split into spans; with a tree
cases = [(Attention(shape, [fed := make(shape, rows)]), shape, fed) for shape in shapes for rows in spans]
wanted = [None if fed.rows.parents else expected(shape, fed) for _, shape, fed in cases]

def run(isa):
    for (attention, _, _), known in zip(cases, wanted):
        (alone,), (seen,) = (attention.run(open_kernels(isa, threads)) for threads in (1, 2))
        assert seen.equal(alone)
        assert known is None or (seen - known).abs().max() < 1e-3
    return "done"

in_children(run)
"""
)
LONG = (
    SETUP
    + """
SHAPE = Shape(heads=32, kv_heads=1, dim=64, window=64)
PASSES = [Attention(SHAPE, [make(SHAPE, Rows(start, rows))]) for start, rows in ((2**16, 1), (7000, 31), (2**16, 64))]

def run(isa):
    kernels, before = open_kernels(isa, 16), peak()
    for attention in PASSES:
        attention.run(kernels)
    return peak() - before

in_children(run)
"""
)


def run(program: str, cases: Collection[object], stack: str = "unlimited") -> list[list[str]]:
    """Run a program with a limit of the stack in KiB; return the words of each line that it prints."""
    code = f"CASES = {cases!r}\n{program}"
    command = ["bash", "-c", f'ulimit -s {stack} && exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return [line.split() for line in done.stdout.splitlines()]


@measured
@pytest.mark.slow
def test_the_largest_attention_needs_no_large_stack() -> None:
    assert run(LARGEST, usable_sets(), stack="512") == [[isa, "done"] for isa in usable_sets()]


@measured
@pytest.mark.slow
def test_scratch_of_attention_does_not_grow_with_the_context() -> None:
    """Softmaxes of every row, head and span take 1, 4 and 69 MiB. Sixteen threads may keep 8 MiB beside them."""
    grown = {isa: int(kib) for isa, kib in run(LONG, usable_sets())}
    assert [*grown] == [*usable_sets()]
    assert max(grown.values()) < (16 + 8 + 8) * 1024, grown


def small_model(**changes: object) -> NativeDecoder:
    sizes: dict[str, object] = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 4000, "num_heads": 8}
    return make_native(**{"threads": 2, **sizes, "num_kv_heads": 1, "head_dim": 64, "max_positions": 2**20, **changes})


PASSES = (
    SETUP
    + """
from speculant.kernels.native import Pass
from speculant.models.base import SequenceInput, build_batch
from speculant.sampling import sampling_settings
from speculant.params import SamplingParams
from speculant.types import DraftTree
from tests.contracts.test_native_scratch import small_model
torch.set_grad_enabled(False)

def run(positions):
    rows, model = CASES[positions], small_model(windows=(64, 64))
    cache = slotted_cache(model.cache_shape, 1, positions)
    for layer in (0, 1):
        for memory in cache.storage.layer(layer):
            memory.fill_(0)
    cache.reserve(1, positions - rows)
    top_p = sampling_settings(SamplingParams(temperature=1.0, top_p=0.9999999))
    model.kernels.probs(torch.zeros(1, 8), [top_p])
    model._angles.grow(positions)  # computing the tables takes more memory than they keep
    tables = sum(table.numel() * table.element_size() for table in model._angles.tensors)
    before = peak()
    batch = build_batch([SequenceInput(1, [5] * rows, DraftTree.empty())], cache, torch.device("cpu"))
    logits = model.logits(model.forward(batch, cache.storage).last)
    model.kernels.probs(logits, [top_p] * rows)
    return f"{tables + 1024 * (peak() - before)} {model.scratch_bytes(rows, positions)}"

in_children(run)
"""
)


@measured
@pytest.mark.slow
def test_passes_keep_no_more_scratch_than_is_counted() -> None:
    rows = {2048: 1024, 2**16: 64}  # for each number of positions
    found = [[int(word) for word in line] for line in run(PASSES, rows)]
    assert [positions for positions, _, _ in found] == [*rows]
    for _, grown, counted in found:
        assert grown < counted + 2**24, "beside what is kept, tensors of a pass"


DRAFT = (
    SETUP
    + """
from speculant.kernels.native import Pass
from speculant.kernels.native import NativeSampler
from speculant.models.base import Chain, SequenceInput, build_batch
from speculant.sampling import KeyedChances
from speculant.types import DraftTree
from tests.contracts.test_native_scratch import small_model
from tests.models import make_request
torch.set_grad_enabled(False)

def run(rows):
    model, positions = small_model(windows=(64, 64), num_heads=32, threads=4), 60000
    cache = slotted_cache(model.cache_shape, 2, positions + 100)
    for layer in (0, 1):
        for memory in cache.storage.layer(layer):
            memory.fill_(0)
    cache.reserve(0, positions), cache.reserve(1, positions)
    request = make_request([5] * (positions + rows), seq_id=1)
    chain = Chain(request, [5] * rows, 2, KeyedChances(NativeSampler(model.kernels)).draft(request))
    model._angles.grow(positions + 100)
    batch = build_batch([SequenceInput(0, [5] * rows, DraftTree.empty())], cache, torch.device("cpu"))
    before = resident()
    model.forward(batch, cache.storage)
    between = resident()
    model.grow([chain], cache, model.vocab_size)
    assert len(chain.tokens) == 2
    return f"{between - before} {resident() - between}"

in_children(run)
"""
)


@measured
@pytest.mark.slow
def test_runs_and_drafts_of_a_thread_share_scratch() -> None:
    """16 rows after 60,000 tokens use all memory that there is for softmaxes of spans."""
    ((_, of_run, of_draft),) = run(DRAFT, [16])
    assert 15 * 1024 < int(of_run) < 24 * 1024
    assert int(of_draft) < 8 * 1024


def test_counted_scratch_grows_up_to_a_bound() -> None:
    model, mib = small_model(), 2**20
    counted = [
        model.scratch_bytes(rows, positions) for rows, positions in ((1, 1), (512, 1), (512, 2**11), (512, 2**17))
    ]
    assert counted == sorted(set(counted))
    spans = counted[3] - counted[2] - 4 * 64 * (2**17 - 2**11)
    assert 0 < spans <= 16 * mib
    assert model.scratch_bytes(2**16, 1) - model.scratch_bytes(2**15, 1) < 2**15 * 4 * 4000, "logits have a bound"


@pytest.mark.parametrize("rows", [1, 300])
def test_buffers_and_angles_are_counted(rows: int) -> None:
    """Their sizes are known, since they are tensors."""
    model, tokens = small_model(), [1] * rows
    cache = slotted_cache(model.cache_shape, 1, 1000)
    batch = build_batch([SequenceInput(1, tokens, DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        model.forward(batch, cache.storage)
    buffers = [value for value in vars(model._buffers).values() if isinstance(value, Tensor)]
    kept = sum(each.numel() * each.element_size() for each in [*buffers, *model._angles.tensors])
    assert kept < model.scratch_bytes(rows, rows)


@pytest.mark.parametrize("rows", [1, 300])
def test_buffers_of_an_encoder_are_counted(rows: int) -> None:
    """Its rows are wider than those of the decoder."""
    config = describe_pair(vocab_size=40)
    assert config.encoder is not None
    wide = tuple(replace(layer, mlp=Mlp(5000)) for layer in config.encoder.layers)
    decoder = Decoder(replace(config, encoder=replace(config.encoder, layers=wide)))
    model = packed(decoder.requires_grad_(False), on())
    cache = slotted_cache(model.cache_shape, 1, 1000)
    batch = build_batch([SequenceInput(1, [1] * rows, DraftTree.empty())], cache, torch.device("cpu"))
    with torch.inference_mode():
        model.encode(batch, cache.storage)
    kept = sum(4 * value.numel() for value in vars(model._buffers).values() if isinstance(value, Tensor))
    assert 4 * 5000 * rows < kept < model.scratch_bytes(rows, rows)
