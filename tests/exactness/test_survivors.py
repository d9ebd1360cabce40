"""A crowd on the embedded pair, with random arrivals, aborts and preemptions: each survivor writes its text alone.

In float64, so that no rounding can decide between two tokens; and in every type of the native kernels, whose rows do
not depend on one another.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from speculant import LLM, SamplingParams
from speculant.engine import Engine
from speculant.kernels import usable_sets
from speculant.types import Request
from tests.exactness.selection import slow_but

MAX_LEN, BLOCK, NUM_BLOCKS, NUM_SEQS = 64, 8, 12, 6
VALUES = {"target": 2048, "draft": 256}  # that a position takes in the cache
NATIVE: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "kernels": "native"},
    "int8": {"dtype": "bfloat16", "kernels": "native", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "kernels": "native", "quantization": "int4"},
}
ENGINES: dict[str, dict[str, Any]] = {"float64": {"dtype": "float64"}, **NATIVE}
native = pytest.mark.skipif(not usable_sets(), reason="the native kernels are not built")

STEMS = ["def read(path):\n    with open(path) as file:\n        return", "class Stack:\n    def __init__(self):\n"]
TAILS = ["", "\n", " x = 1\n", "\n    def push(self, item):", '\n    """Return the', "\n    for name in names:\n"]
DISTRIBUTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.3},
    {"temperature": 1.3, "min_p": 0.05},
]


@dataclass(frozen=True)
class Visit:
    """A request that comes before a certain step, and perhaps is aborted before another."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    cache_salt: str
    comes: int
    goes: int | None


@dataclass(frozen=True)
class Crowd:
    """Visits, and the samples of each one alone."""

    visits: list[Visit]
    alone: list[list[list[int]]]


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def crowd(size: int, weights: str) -> Crowd:
    """Make a crowd of which every fifth is to be aborted, and let each go through an empty plain engine."""
    llm = LLM("demo", max_model_len=MAX_LEN, max_num_seqs=1, enable_prefix_caching=False, **ENGINES[weights])
    rng, visits, comes = random.Random(size), list[Visit](), 0
    for index in range(size):
        comes += rng.choice((0, 0, 1, 2))
        text = rng.choice(STEMS) + rng.choice(TAILS) + rng.choice(TAILS)
        prompt = llm.tokenizer.encode(text)[: rng.randint(3, 28)]
        goes = comes + rng.randint(1, 12) if index % 5 == 0 else None
        visits.append(Visit(tuple(prompt), _params(rng), rng.choice((0, 0, 1)), rng.choice(("", "", "b")), comes, goes))
    alone = [llm.generate([list(visit.prompt)], visit.params)[0] for visit in visits]
    return Crowd(visits, [[sample.token_ids for sample in output.outputs] for output in alone])


def _params(rng: random.Random) -> SamplingParams:
    """Draw greedy or seeded settings, now and then for two samples."""
    distribution = rng.choice(DISTRIBUTIONS)
    return SamplingParams(
        **distribution,
        n=1 + (rng.random() < 0.1),
        seed=rng.randrange(1000) if distribution["temperature"] else None,
        max_tokens=rng.randint(4, 34),
        ignore_eos=rng.random() < 0.7,
    )


def run(engine: Engine, visits: list[Visit]) -> list[list[Request]]:
    """Let visits come and go between an engine's steps; return each one's sequences once all are over."""
    requests: dict[int, list[Request]] = {}
    now = 0
    while len(requests) < len(visits) or engine.has_unfinished():
        for index, visit in enumerate(visits):
            if visit.comes == now:
                requests[index] = engine.add_request(
                    visit.prompt, visit.params, str(index), priority=visit.priority, cache_salt=visit.cache_salt
                )
            if visit.goes == now:
                engine.abort(str(index))
        engine.step()
        engine.check()
        now += 1
    return [requests[index] for index in range(len(visits))]


def scarce(backend: str, caching: bool, speculating: bool, weights: str) -> LLM:
    """Make an engine on the embedded pair, with blocks for hardly two sequences if it is paged."""
    itemsize = getattr(torch, ENGINES[weights]["dtype"]).itemsize
    per_position = itemsize * (VALUES["target"] + (VALUES["draft"] if speculating else 0))
    return LLM(
        "demo",
        draft_model="demo" if speculating else None,
        spec_length=3 if speculating else None,  # whatever the steps of this machine cost
        max_model_len=MAX_LEN,
        max_num_seqs=NUM_SEQS,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        kv_cache_backend=backend,
        kv_memory=NUM_BLOCKS * BLOCK * per_position if backend == "paged" else None,
        enable_prefix_caching=caching,
        **ENGINES[weights],
    )


def check_survivors(size: int, backend: str, caching: bool, speculating: bool, weights: str = "float64") -> None:
    """Run a crowd in one configuration: each request writes its text alone, and all memory is given back."""
    there, engine = crowd(size, weights), scarce(backend, caching, speculating, weights).engine
    capacity = engine.free_kv_tokens()
    visited = run(engine, there.visits)
    assert engine.free_kv_tokens() == capacity, "memory was not given back"
    for visit, samples, alone in zip(there.visits, visited, there.alone, strict=True):
        for request, expected in zip(samples, alone, strict=True):
            aborted = request.ending.reason == "abort"
            assert aborted <= (visit.goes is not None)
            assert aborted or request.ending.reason in ("stop", "length")
            wanted = expected[: request.num_output] if aborted else expected
            assert request.output == wanted, f"not what it says alone: {visit}"
    survivors = [request for samples in visited for request in samples if request.ending.reason != "abort"]
    assert 0.75 < len(survivors) / sum(map(len, visited)) < 0.9, "too many aborts or too few"
    if speculating:
        assert sum(r.metrics.speculative_decoding.num_accepted_draft_tokens for r in survivors) > size
    if backend == "paged":
        assert engine.metrics.blocks_total == NUM_BLOCKS
        assert sum(r.metrics.num_preemptions > 0 for r in survivors) > size // 16, "hardly anybody was preempted"
        hits = sum(samples[0].metrics.cached_tokens for samples in visited)  # second samples share their first's prompt
        assert (hits > 0) == caching


@pytest.mark.slow
def test_survivors_write_the_same_text_alone() -> None:
    check_survivors(24, "paged", caching=True, speculating=True)


@native
@pytest.mark.parametrize(
    ("weights", "backend"),
    slow_but([("int8", "paged")], zip(NATIVE, ["paged", "slotted"] * 2, strict=True)),
)
def test_survivors_on_the_native_kernels(weights: str, backend: str) -> None:
    check_survivors(24, backend, caching=True, speculating=True, weights=weights)


@native
@pytest.mark.slow
@pytest.mark.covering(2)
@pytest.mark.parametrize("weights", NATIVE)
@pytest.mark.parametrize("speculating", [True, False], ids=["drafts", "plain"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no prefixes"])
@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_survivors_on_the_native_kernels_in_full(backend: str, caching: bool, speculating: bool, weights: str) -> None:
    check_survivors(64, backend, caching, speculating, weights)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("speculating", [True, False], ids=["drafts", "plain"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefixes", "no prefixes"])
@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_survivors_write_the_same_text_alone_in_full(backend: str, caching: bool, speculating: bool) -> None:
    check_survivors(64, backend, caching, speculating)
