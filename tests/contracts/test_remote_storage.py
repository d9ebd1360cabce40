"""Models and storages in another process than tables, scheduler, drafters and verifiers change no text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from speculant.cache import CacheShape, KVCache, KVStorage, Moves, TensorStorage
from speculant.config import Limits
from speculant.drafting import Drafter, Drafters, DraftModelRunner, ModelDrafter, StaticTree
from speculant.engine import Engine, EngineOptions
from speculant.kernels import REFERENCE, NativeSampler, open_kernels
from speculant.lengths import Fixed
from speculant.models import CausalLM, load_model
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import Request
from tests.fakes import known_verifiers
from tests.models import PRINTABLE, Checkpoints
from tests.remote import RemoteModel, RemoteStorage, Worker, started_worker

LIMITS = Limits(max_model_len=32, max_num_seqs=4, max_num_batched_tokens=40)
BLOCK, NUM_BLOCKS = 4, 14  # one sequence needs up to eight
SPEC_LENGTH = 6
BACKENDS = {"reference": ("float64", "reference"), "native": ("float32", "native")}  # dtype, kernels
SIZES = {"paged": (NUM_BLOCKS, BLOCK), "slotted": (LIMITS.max_num_seqs, LIMITS.max_model_len)}
TOPOLOGIES = {"chain": None, "tree": StaticTree.of_widths([2, 1, 2])}

PROMPT = PRINTABLE[:10]  # two blocks and a half
WAVES: list[list[tuple[list[int], dict[str, Any]]]] = [
    [(PROMPT, {"temperature": 0.0}), (PROMPT[::-1], {"seed": 3, "n": 3})],
    [
        ([*PROMPT, 40, 41], {"temperature": 0.0, "n": 2}),
        (PROMPT, {"seed": 5, "temperature": 0.7}),
        (PROMPT[:9], {"beam_width": 3, "n": 2, "temperature": 0.0}),
        (PROMPT[5:], {"seed": 6, "repetition_penalty": 1.2}),
        (PROMPT[3:], {"seed": 7, "speculation": False}),
    ],
]

MakeStorage = Callable[[CacheShape, int], KVStorage]


@dataclass(eq=False)
class Site:
    """Where an engine's models and storages are. `storages` are those that were made: the target's, the draft's."""

    target: CausalLM
    draft: CausalLM
    make_storage: MakeStorage
    native: bool

    def engine(self, kind: str, drafts: str) -> tuple[Engine, list[KVStorage]]:
        """Put an engine together; return the storages of its target and its draft model, too."""
        kernels = open_kernels() if self.native else None
        sampler = NativeSampler(kernels) if kernels is not None else REFERENCE
        caches = [self._cache(kind, model.cache_shape) for model in (self.target, self.draft)]
        drafter: Drafter | None = None
        if drafts != "none":
            runner = DraftModelRunner(self.draft, caches[1], KeyedChances(sampler), LIMITS.max_num_batched_tokens)
            drafter = ModelDrafter(runner, self.target.vocab_size, sampler, TOPOLOGIES[drafts])
        engine = Engine(
            EngineOptions(LIMITS, 0, frozenset(), sampler=sampler), self.target, caches[0], KeyedChances(sampler),
            known_verifiers(), Fixed(SPEC_LENGTH), Drafters.of(drafter),
        )  # fmt: skip
        return engine, [cache.storage for cache in caches]

    def _cache(self, kind: str, shape: CacheShape) -> KVCache:
        num_blocks, size = SIZES[kind]
        storage, is_paged = self.make_storage(shape, num_blocks * size), kind == "paged"
        return KVCache(storage, [num_blocks], size, is_paged, max_len=LIMITS.max_model_len)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with started_worker() as worker:
        yield worker


@pytest.fixture(scope="module", params=BACKENDS)
def sites(request: pytest.FixtureRequest, worker: Worker, checkpoints: Checkpoints) -> dict[str, Site]:
    dtype, kernels = BACKENDS[request.param]
    if kernels == "native" and open_kernels() is None:
        pytest.skip("the native kernels are not built")
    folders, native = (checkpoints.target, checkpoints.near), kernels == "native"
    here = [load_model(folder, dtype, "cpu", kernels=kernels).model for folder in folders]
    there = [RemoteModel(worker, folder, dtype, kernels) for folder in folders]
    return {
        "here": Site(*here, lambda shape, n: TensorStorage(shape, n, "lower the test's size."), native),
        "there": Site(*there, lambda shape, n: RemoteStorage(worker, shape, n), native),
    }


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


Texts = list[tuple[list[int], str | None, float | None]]


def run(engine: Engine) -> Texts:
    """Run all waves of requests; return each sequence's text, end and score."""
    requests: list[Request] = []
    for wave in WAVES:
        for prompt, values in wave:
            params = SamplingParams(max_tokens=16, **values)
            requests += engine.add_request(prompt, params, str(len(requests)))
        while engine.has_unfinished():
            engine.step()
            engine.check()
    for request in requests:
        if request.ending.error is not None:
            raise request.ending.error
    return [(request.output, request.ending.reason, request.cumulative_logprob) for request in requests]


@functools.cache
def local_texts(site: Site, kind: str, drafts: str) -> Texts:
    """Return the texts of an engine whose models and storages are in this process."""
    return run(site.engine(kind, drafts)[0])


@pytest.mark.covering(2)
@pytest.mark.parametrize("drafts", ["none", "chain", "tree"])
@pytest.mark.parametrize("kind", SIZES)
def test_remote_storage_changes_no_text(sites: dict[str, Site], kind: str, drafts: str) -> None:
    engine, storages = sites["there"].engine(kind, drafts)
    assert run(engine) == local_texts(sites["here"], kind, drafts)
    assert isinstance(storages[0], RemoteStorage)
    assert storages[0].num_moved > 0, "nothing was copied: a weak test"
    if kind == "paged":
        assert engine.metrics.preemptions > 0, "there was room for all: a weak test"
        assert engine.metrics.prefix_hit_tokens > 0, "no prefix was found: a weak test"


class Unmoved(RemoteStorage):
    """A storage of zeros that ignores moves."""

    def __init__(self, worker: Worker, shape: CacheShape, num_slots: int) -> None:
        super().__init__(worker, shape, num_slots)
        zeros = torch.zeros(num_slots, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype)
        for layer in range(shape.num_layers):
            self.write(layer, torch.arange(num_slots), zeros, zeros)

    def move(self, moves: Moves) -> None:
        """Do nothing."""


@pytest.mark.parametrize("kind", SIZES)
def test_storage_that_ignores_moves_is_found(sites: dict[str, Site], worker: Worker, kind: str) -> None:
    there = sites["there"]
    site = Site(there.target, there.draft, lambda shape, n: Unmoved(worker, shape, n), there.native)
    assert run(site.engine(kind, "none")[0]) != local_texts(sites["here"], kind, "none")


def test_remote_errors_come_back(sites: dict[str, Site], worker: Worker) -> None:
    with pytest.raises(IndexError):
        worker.ask("move", 10**6, Moves([0], [1]))
