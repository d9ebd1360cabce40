"""The target's first layers draft on the target's own keys and values: no text and no draft changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.drafting import (
    Drafter,
    Drafters,
    DraftModelRunner,
    ModelDrafter,
    StaticTree,
    TreeTopology,
    make_target_drafter,
)
from speculant.engine import Engine, EngineOptions
from speculant.kernels import REFERENCE, NativeSampler, Sampler, usable_sets
from speculant.lengths import Fixed
from speculant.models import CausalLM, NativeDecoder, Truncatable
from speculant.sampling import KeyedChances
from speculant.types import NO_WORK, Request
from tests.exactness.test_windows import BACKENDS, BLOCK, LIMITS, decoder_of, run, small_cache
from tests.fakes import drafter_context, known_verifiers

CPU, ENOUGH = torch.device("cpu"), 1000  # tokens of a pass, so that no draft waits for a prompt
LAYERS: dict[str, tuple[tuple[int | None, ...], int]] = {  # windows, and layers that draft
    "no window": ((None, None, None), 1),
    "all layers but one": ((None, None, None), 2),
    "windows alone draft": ((9, 9, None), 2),
    "the first group is not used": ((5, 9, None), 1),
    "full layers alone draft": ((None, 9, 5), 1),
    "all groups draft": ((9, None, 9), 2),
}
TREES: dict[str, TreeTopology | None] = {"chain": None, "tree": StaticTree.of_widths([2, 1, 2])}

pytestmark = pytest.mark.usefixtures("one_thread")


def roomy(shape: CacheShape) -> KVCache:
    return paged_cache(shape, [200] * len(shape.groups), BLOCK)


def sampler_of(model: CausalLM) -> Sampler:
    return NativeSampler(model.kernels) if isinstance(model, NativeDecoder) else REFERENCE


def drafter_of(target: CausalLM, layers: int, tree: str, cache: KVCache | None) -> Drafter:
    """Return the drafter of the first layers on the target's cache; None = on a cache of its own."""
    assert isinstance(target, Truncatable)
    first, sampler, topology = target.truncated(layers), sampler_of(target), TREES[tree]
    if cache is None:
        runner = DraftModelRunner(first, roomy(first.cache_shape), KeyedChances(sampler), ENOUGH)
        return ModelDrafter(runner, target.vocab_size, sampler, topology)
    context = drafter_context(
        target.vocab_size, make_cache=roomy, target_cache=lambda: cache, sampler=sampler,
        budget=LIMITS.max_num_batched_tokens,
    )  # fmt: skip
    return make_target_drafter(context, target, first, topology)


def engine_of(target: CausalLM, cache: KVCache, drafter: Drafter | None, limits: Limits = LIMITS) -> Engine:
    sampler = sampler_of(target)
    return Engine(
        EngineOptions(limits, 0, frozenset(), sampler=sampler), target, cache, KeyedChances(sampler),
        known_verifiers(), Fixed(5), Drafters.of(drafter),
    )  # fmt: skip


def recorded(engine: Engine) -> tuple[Any, list[Any]]:
    """Run all waves; return the texts, and the drafts' sizes and accepted tokens of each request."""
    added, add = list[Request](), engine.add_request

    def add_request(*arguments: Any, **options: Any) -> list[Request]:
        made = add(*arguments, **options)
        for request in made:
            request.work = NO_WORK  # drafts of beams are bounded by measured time
        added.extend(made)
        return made

    engine.add_request = add_request  # type: ignore[method-assign, assignment]
    texts = run(engine)
    metrics = [request.metrics.speculative_decoding for request in added]
    return texts, [(each.per_step_drafted, each.per_step_accepted) for each in metrics]


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layers", LAYERS)
def test_drafts_are_those_of_a_cache_of_its_own(layers: str, tree: str, backend: str) -> None:
    """Chunked prompts, samples, beams, prefix hits and requests without drafts beside each other."""
    windows, exit_at = LAYERS[layers]
    target = decoder_of(backend, windows)
    found = []
    for shared in (True, False):
        cache = roomy(target.cache_shape)
        drafter = drafter_of(target, exit_at, tree, cache if shared else None)
        engine = engine_of(target, cache, drafter)
        found.append(recorded(engine))
        assert engine.metrics.drafter_errors == 0
        assert drafter.needs.own_cache != shared
    assert found[0] == found[1]
    assert sum(map(sum, (accepted for _, accepted in found[0][1]))) > 10, "nothing was accepted: a weak test"


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layers", LAYERS)
def test_short_memory_changes_no_text(layers: str, tree: str, backend: str) -> None:
    """Sequences are preempted, and blocks are shared and copied on write; drafts take none from others."""
    windows, exit_at = LAYERS[layers]
    target = decoder_of(backend, windows)
    plain = engine_of(target, slotted_cache(target.cache_shape, LIMITS.max_num_seqs, LIMITS.max_model_len), None)
    cache = small_cache(target.cache_shape, LIMITS.max_num_batched_tokens)
    engine = engine_of(target, cache, drafter_of(target, exit_at, tree, cache))
    assert run(engine) == run(plain)
    assert engine.metrics.drafter_errors == 0
    assert engine.metrics.preemptions > 0, "there was room for all: a weak test"
    assert engine.metrics.prefix_hit_tokens > 0, "no prefix was found: a weak test"
    assert all(pool.num_free == pool.num_blocks for pool in cache.pools), "a leak"


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_block_per_sequence_is_enough(backend: str) -> None:
    target = decoder_of(backend, (None, 9, None))
    found = []
    for drafting in (True, False):
        cache = slotted_cache(target.cache_shape, LIMITS.max_num_seqs, LIMITS.max_model_len)
        engine = engine_of(target, cache, drafter_of(target, 2, "chain", cache) if drafting else None)
        found.append(run(engine))
        assert engine.metrics.drafter_errors == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("tree", TREES)
def test_an_error_within_a_draft_leaves_the_cache(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third pass of the first layers fails after its positions were reserved."""
    backend, passes = "native" if usable_sets() else "reference", 0
    target = decoder_of(backend, (5, 9, None))
    cache = roomy(target.cache_shape)
    drafter = drafter_of(target, 1, tree, cache)
    view = type(drafter._runner.cache)  # type: ignore[attr-defined]
    assert view is not type(cache), "its calls can't be told from the target's"
    reserve = view.reserve

    def failing(self: KVCache, seq_id: int, n: int) -> Any:
        nonlocal passes
        slots = reserve(self, seq_id, n)
        passes += 1
        if passes % 3 == 0:
            raise RuntimeError("no luck")
        return slots

    monkeypatch.setattr(view, "reserve", failing)
    engine = engine_of(target, cache, drafter)
    texts = run(engine)
    assert engine.metrics.drafter_errors > 3
    monkeypatch.undo()
    assert texts == run(engine_of(target, roomy(target.cache_shape), None))
