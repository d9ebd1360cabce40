"""Layers with a window give back what no later row sees: no text changes, and the memory is there for others."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from speculant.cache import CacheShape, KVCache, paged_cache, slotted_cache
from speculant.config import EngineConfig, Limits
from speculant.drafting import Drafter, Drafters, DraftModelRunner, ModelDrafter, StaticTree
from speculant.engine import Engine, EngineOptions, Need, build_engine
from speculant.errors import CapacityError
from speculant.kernels import REFERENCE, NativeSampler, usable_sets
from speculant.lengths import Fixed
from speculant.models import CausalLM, NativeDecoder, SequenceInput, build_batch
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import DraftTree, Request
from tests.blocks import table_of
from tests.caches import seen_from
from tests.exactness.test_native_decoder import make_decoder, packed, tokens_of
from tests.fakes import known_verifiers
from tests.models import Shape, write_checkpoint
from tests.native import on

BLOCK, CPU = 4, torch.device("cpu")
LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=20)
BACKENDS = ["native", pytest.param("reference", marks=pytest.mark.slow)] if usable_sets() else ["reference"]
WINDOWS: dict[str, tuple[int | None, ...]] = {
    **{f"full and {window}": (None, window) for window in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 9, 100)},
    "12 and 5": (12, 5),
    "7": (7, 7),
}
DRAFTS = {"none": None, "chain": None, "tree": StaticTree.of_widths([2, 1, 2])}
PROMPT = tokens_of(7)[:21]

pytestmark = pytest.mark.usefixtures("one_thread")


def decoder_of(backend: str, windows: tuple[int | None, ...], noise: float = 0.0) -> CausalLM:
    """Return a small decoder; with noise, one that often agrees with it."""
    decoder = make_decoder(torch.float64 if backend == "reference" else torch.float32, windows=windows)
    if noise:
        decoder = copy.deepcopy(decoder)
        generator = torch.Generator().manual_seed(1)
        for parameter in decoder.parameters():
            parameter.add_(noise * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator))
        decoder.tie_head()
    if backend == "reference":
        return decoder
    return packed(decoder, on(threads=1))


def small_cache(shape: CacheShape, rows: int, spare_blocks: int = 2) -> KVCache:
    """Make a cache with room for one sequence and little more."""
    need = Need(shape, BLOCK, LIMITS.max_num_seqs, rows, rows)
    return paged_cache(shape, need.counts(need.blocks_for(LIMITS.max_model_len) + spare_blocks), BLOCK)


def engine_of(target: CausalLM, draft: CausalLM, drafts: str, caches: Sequence[KVCache]) -> Engine:
    kernels = target.kernels if isinstance(target, NativeDecoder) else None
    sampler = NativeSampler(kernels) if kernels is not None else REFERENCE
    drafter: Drafter | None = None
    if drafts != "none":
        runner = DraftModelRunner(draft, caches[1], KeyedChances(sampler), LIMITS.max_num_batched_tokens)
        drafter = ModelDrafter(runner, target.vocab_size, sampler, DRAFTS[drafts])
    return Engine(
        EngineOptions(LIMITS, 0, frozenset(), sampler=sampler), target, caches[0], KeyedChances(sampler),
        known_verifiers(), Fixed(5), Drafters.of(drafter),
    )  # fmt: skip


WAVES: list[list[tuple[list[int], dict[str, Any]]]] = [
    [(PROMPT, {"temperature": 0.0}), (PROMPT[::-1], {"seed": 3, "n": 3})],
    [
        ([*PROMPT, 40, 41], {"temperature": 0.0, "max_tokens": 40}),
        (PROMPT, {"seed": 5, "temperature": 0.7}),
        (PROMPT[:9], {"beam_width": 3, "n": 2, "temperature": 0.0}),
        (PROMPT[5:], {"seed": 6, "repetition_penalty": 1.2}),
        (PROMPT[::-1], {"temperature": 0.0, "speculation": False}),
    ],
]


def run(engine: Engine) -> list[tuple[list[int], str | None]]:
    """Run all waves of requests; return each sequence's text and end."""
    requests: list[Request] = []
    for wave in WAVES:
        for prompt, values in wave:
            params = SamplingParams(**{"max_tokens": 30, **values})
            requests += engine.add_request(prompt, params, str(len(requests)))
        while engine.has_unfinished():
            engine.step()
            engine.check()
    for request in requests:
        if request.ending.error is not None:
            raise request.ending.error
    return [(request.output, request.ending.reason) for request in requests]


@pytest.mark.covering(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("windows", WINDOWS)
def test_no_text_changes(windows: str, drafts: str, backend: str) -> None:
    """Prompts and drafts across the window, prefix hits, samples, beams, preemption; beside a cache that keeps all."""
    target, draft = decoder_of(backend, WINDOWS[windows]), decoder_of(backend, WINDOWS[windows], noise=0.1)
    shape, most = target.cache_shape, LIMITS.max_num_batched_tokens
    keeping = [slotted_cache(shape, LIMITS.max_num_seqs, LIMITS.max_model_len) for _ in range(2)]
    caches = [small_cache(shape, most), small_cache(shape, 2 * most * LIMITS.max_num_seqs)]
    engine = engine_of(target, draft, drafts, caches)
    assert run(engine) == run(engine_of(target, draft, "none", keeping))
    assert engine.metrics.prefix_hit_tokens > 0, "no prefix was found: a weak test"
    if None in WINDOWS[windows]:
        assert engine.metrics.preemptions > 0, "there was room for all: a weak test"
    for cache in caches:
        assert all(pool.num_free == pool.num_blocks for pool in cache.pools), "a leak"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("windows", WINDOWS)
@torch.inference_mode()
def test_what_was_given_back_is_never_read(windows: str, backend: str) -> None:
    """All free slots hold NaN, in passes of many rows, of one, and of a tree."""
    model, tokens = decoder_of(backend, WINDOWS[windows]), tokens_of(2)[:150]
    whole = slotted_cache(model.cache_shape, 1, 200)
    (expected,) = feed(model, whole, tokens, [150])
    cache = paged_cache(model.cache_shape, 60, BLOCK)
    seen = torch.cat(feed(model, cache, tokens, [1, 2, 30, 1, 1, 1, 1, 20, 40, 50, 1, 1, 1]))
    assert torch.equal(seen, expected) if backend == "native" else torch.allclose(seen, expected, atol=1e-10)
    tree = DraftTree.of([5, 6, 7, 8], [-1, -1, 0, 2])
    rows = [
        model.logits(model.forward(build_batch([SequenceInput(1, [3], tree)], each, CPU), each.storage).last)
        for each in (whole, cache)
    ]
    assert torch.equal(*rows) if backend == "native" else torch.allclose(*rows, atol=1e-10)


def feed(model: CausalLM, cache: KVCache, tokens: Sequence[int], chunks: Sequence[int]) -> list[torch.Tensor]:
    """Compute tokens in chunks, and spoil all that is free after each; return the logits of all rows."""
    rows, first = [], 0
    for count in chunks:
        batch = build_batch([SequenceInput(1, tokens[first : first + count], DraftTree.empty())], cache, CPU)
        rows.append(model.logits(model.forward(batch, cache.storage).last))
        cache.drop_unseen(1)
        spoil(model.cache_shape, cache)
        first += count
    return rows


def spoil(shape: CacheShape, cache: KVCache) -> None:
    """Fill the blocks that a cache's only sequence does not hold."""
    for index, (group, pool) in enumerate(zip(shape.groups, cache.pools, strict=False)):
        held = table_of(cache, 1, index)
        if cache.block_size == BLOCK:
            held = held[seen_from(group.window, cache.length(1)) // BLOCK :]
        free = torch.tensor([block not in held for block in range(pool.num_blocks)])
        for layer in group.layers:
            for part in cache.storage.layer(layer):
                part.view(pool.num_blocks, -1)[free] = torch.nan


@pytest.mark.parametrize("window", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 9])
def test_a_long_text_holds_no_more_than_the_window(window: int) -> None:
    """One block is the most that is held beyond the window - 1 positions which a next row sees."""
    model = make_decoder(torch.float32, windows=(None, window))
    cache = paged_cache(model.cache_shape, 100, BLOCK)
    full, windowed = cache.pools
    for length in range(1, 100):
        cache.reserve(1, 1)
        cache.drop_unseen(1)
        held = windowed.num_blocks - windowed.num_free
        assert held == -(-length // BLOCK) - seen_from(window, length) // BLOCK
        assert held <= -(-(window + BLOCK - 2) // BLOCK)
        assert full.num_blocks - full.num_free == -(-length // BLOCK)


def test_a_prefix_is_found_as_far_as_every_group_has_its_window() -> None:
    """A layer's blocks of an earlier text are evicted one by one, in the order 0, 1, 5, 4, 3.

    A prefix of 24 tokens needs 4 and 5, one of 20 needs 3 and 4, one of 16 needs 2 and 3, a shorter one 0 or 1.
    """
    cache = paged_cache(CacheShape(2, 1, 1, torch.float32, CPU, (None, 6)), [20, 8], BLOCK)
    text, (_, windowed) = list(range(24)), cache.pools
    for length in range(0, 24, BLOCK):
        cache.reserve(1, BLOCK)
        cache.insert_prefix(1, text[: length + BLOCK])
        cache.drop_unseen(1)
    cache.release(1)
    cache.reserve(3, 2 * BLOCK)  # from here on, no block is free without an eviction
    found = []
    for num_evicted in range(6):
        assert windowed.num_free == 6 - num_evicted
        known = [cache.match_prefix(2, [*text, 99])]
        cache.release(2)
        known.append(cache.match_prefix(2, [*text[:17], 99]))
        cache.release(2)
        cache.check()
        found.append(known)
        cache.reserve(3, BLOCK)
    assert found == [[24, 16], [24, 16], [24, 16], [20, 16], [16, 16], [0, 0]]


# --- whole engines


@pytest.fixture(scope="module")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of four layers, of which three see 16 positions."""
    folder = tmp_path_factory.mktemp("windowed") / "model"
    write_checkpoint(folder, Shape(family="qwen2", layers=4, max_positions=512))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def text_of(folder: str, **settings: Any) -> tuple[list[int], Engine]:
    """Generate a text of 400 tokens."""
    config = {"max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": 32, "seed": 1, **settings}
    engine = build_engine(EngineConfig(model=folder, **config)).engine
    (request,) = engine.add_request([40, 41, 42] * 20, SamplingParams(max_tokens=400, ignore_eos=True), "1")
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert request.ending.reason == "length", request.ending.error
    return request.output, engine


@pytest.mark.parametrize("kernels", BACKENDS)
def test_memory_that_all_positions_do_not_fit_into_is_enough(
    kernels: str, windowed_folder: str, tmp_path: Path
) -> None:
    """Of 512 positions, one layer in four keeps all."""
    shape = build_engine(EngineConfig(model=windowed_folder, kernels=kernels)).checkpoint.model.cache_shape
    memory = int(0.5 * 512 * shape.bytes_per_token)
    plain = json.loads((Path(windowed_folder) / "config.json").read_text(encoding="utf-8"))
    full = tmp_path / "full"
    full.mkdir()
    for file in Path(windowed_folder).iterdir():
        (full / file.name).symlink_to(file)
    (full / "config.json").unlink()
    (full / "config.json").write_text(json.dumps(plain | {"use_sliding_window": False}), encoding="utf-8")
    with pytest.raises(CapacityError, match="the target's cache"):
        text_of(str(full), kernels=kernels, kv_memory=memory)
    text, engine = text_of(windowed_folder, kernels=kernels, kv_memory=memory, use_speculative_decoding=False)
    speculative, _ = text_of(windowed_folder, kernels=kernels, kv_memory=memory)
    slotted, _ = text_of(windowed_folder, kernels=kernels, kv_cache_backend="slotted")
    assert text == speculative == slotted
    allocated = sum(part.nbytes for part in engine._context.cache.storage._data)  # type: ignore[attr-defined]
    assert allocated <= memory


def test_a_sibling_starts_late_without_its_window() -> None:
    """Samples that start late: the first has gone on, and no longer holds what the prompt's last token sees."""
    limits = Limits(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=20)
    model = decoder_of("reference", (None, 5))
    texts, full_blocks = [], len(PROMPT) // BLOCK * BLOCK
    for cache in (paged_cache(model.cache_shape, 60, BLOCK), slotted_cache(model.cache_shape, 2, 64)):
        engine = Engine(
            EngineOptions(limits, 0, frozenset()), model, cache, KeyedChances(REFERENCE), known_verifiers(), Fixed(0),
            Drafters.of(None),
        )  # fmt: skip
        requests = engine.add_request(PROMPT, SamplingParams(n=3, seed=1, max_tokens=12), "1")
        while engine.has_unfinished():
            engine.step()
            engine.check()
        texts.append([request.output for request in requests])
        assert requests[1].metrics.cached_tokens == len(PROMPT) - 1, "it starts when the prompt is computed"
        assert requests[2].metrics.cached_tokens == (full_blocks if cache.num_groups > 1 else len(PROMPT) - 1)
    assert texts[0] == texts[1]
