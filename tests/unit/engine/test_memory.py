"""How kv_memory is shared out: never more than there is, about as many positions for each, and clear refusals."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st

from speculant.cache import CacheShape, KVCache, ReservationPlan
from speculant.config import EngineConfig, Limits
from speculant.engine import (
    FALLBACK,
    CacheMemory,
    Need,
    build_engine,
    expected_bytes,
    free_memory,
    memory as memory_module,
)
from speculant.errors import CapacityError
from speculant.kernels import usable_sets
from tests.models import Checkpoints

BACKENDS = ["paged", "slotted"]


def shape(layers: int = 2, heads: int = 1, head_dim: int = 4) -> CacheShape:
    return CacheShape(layers, heads, head_dim, torch.float32, torch.device("cpu"))


TARGET, DRAFT = shape(layers=6), shape(layers=2)
LIMITS = Limits(max_model_len=100, max_num_seqs=3, max_num_batched_tokens=8)


def memory_of(limits: Limits = LIMITS, target: CacheShape = TARGET, **arguments: Any) -> CacheMemory:
    config = EngineConfig(model="m", **{"max_model_len": limits.max_model_len, **arguments})
    return CacheMemory.of(config, limits, target)


def positions(cache: KVCache) -> int:
    return cache.num_blocks * cache.block_size


@given(
    backend=st.sampled_from(BACKENDS),
    layers=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    kv_memory=st.integers(1, 500_000),
    block_size=st.integers(1, 40),
    max_model_len=st.integers(1, 60),
    max_num_seqs=st.integers(1, 4),
)
def test_both_caches_fit_into_the_budget(
    backend: str,
    layers: tuple[int, int],
    kv_memory: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    target, draft = shape(layers[0]), shape(layers[1])
    limits = Limits(max_model_len, max_num_seqs, 8)
    memory = memory_of(limits, target, kv_memory=kv_memory, kv_cache_backend=backend, block_size=block_size)
    try:
        draft_cache, target_cache = memory.make(draft), memory.make_target()
    except CapacityError:
        assume(False)
    used = positions(draft_cache) * draft.bytes_per_token + positions(target_cache) * target.bytes_per_token
    assert used <= kv_memory
    assert positions(target_cache) >= positions(draft_cache) >= max_model_len
    if backend == "paged":
        assert kv_memory - used < block_size * (target.bytes_per_token + draft.bytes_per_token), "memory lies idle"


@pytest.mark.parametrize("draft", [DRAFT, TARGET, shape(layers=6), None], ids=["small", "same", "equal", "none"])
def test_all_of_a_given_budget_is_used(draft: CacheShape | None) -> None:
    """Also where the draft's shape is the target's own."""
    memory = memory_of(kv_memory="1MiB", block_size=16)
    draft_positions = positions(memory.make(draft)) if draft else 0
    target_positions = positions(memory.make_target())
    together = TARGET.bytes_per_token + (draft.bytes_per_token if draft else 0)
    assert target_positions - 2**20 // together in range(-15, 17), "but for a block"
    assert draft is None or 0 <= target_positions - draft_positions <= 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_budget_memory_is_enough_for_all_sequences(backend: str) -> None:
    memory = memory_of(kv_cache_backend=backend, block_size=16)
    caches = [memory.make(DRAFT), memory.make_target()]
    assert [positions(cache) for cache in caches] == [3 * 112 if backend == "paged" else 3 * 100] * 2


def test_without_a_budget_a_share_of_free_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 2 * 200 * TARGET.bytes_per_token)
    assert positions(memory_of(block_size=10).make_target()) == 200
    assert positions(memory_of(block_size=10, kv_memory=10**6).make_target()) > 200, "who names a budget gets it"


def test_scratch_memory_is_counted_before_caches_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 2 * 200 * TARGET.bytes_per_token + 5000)
    config = EngineConfig(model="m", block_size=10)
    assert positions(CacheMemory.of(config, LIMITS, TARGET, scratch=5000).make_target()) == 200
    assert positions(CacheMemory.of(config, LIMITS, TARGET, 4000, scratch=1000).make_target()) == 200
    refused(CacheMemory.of(config, LIMITS, TARGET, scratch=10**9).make_target)


@pytest.mark.parametrize(("scratch", "said"), [(0, 0), (4 * 2**20, 1)])
def test_kv_memory_without_room_for_scratch_memory_is_logged(
    scratch: int, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "free_memory", lambda device: 5 * 2**20)
    CacheMemory.of(EngineConfig(model="m", kv_memory="2MiB"), LIMITS, TARGET, scratch=scratch)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == said
    assert all("lower kv_memory" in warning for warning in warnings)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_an_engine_counts_its_target_s_scratch_memory(
    kernels: str, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    if kernels == "native" and not usable_sets():
        pytest.skip("the native kernels are not built")
    counted = list[float]()
    for sizes in ((16, 64), (256, 256)):
        with caplog.at_level(logging.INFO, "speculant.engine.memory"):
            caplog.clear()
            config = {"max_num_batched_tokens": sizes[0], "max_model_len": sizes[1], "max_num_seqs": 2}
            build_engine(EngineConfig(model=checkpoints.target, kernels=kernels, **config))
        (line,) = (record.getMessage() for record in caplog.records if "scratch memory" in record.getMessage())
        counted.append(float(line.split()[-2]))
    assert counted == ([0, 0] if kernels == "reference" else sorted(set(counted)))


EXPECTED: list[dict[str, Any]] = [
    {},
    {"kernels": "reference"},
    {"dtype": "bfloat16", "max_model_len": 40},
    {"quantization": "int8", "max_num_batched_tokens": 2048},
]


@pytest.mark.parametrize("more", EXPECTED, ids=str)
def test_the_size_of_an_engine_is_known_before_it_is_loaded(more: dict[str, Any], checkpoints: Checkpoints) -> None:
    if more.get("kernels") != "reference" and not usable_sets():
        pytest.skip("the native kernels are not built")
    config = EngineConfig(model=checkpoints.target, kv_memory="1MiB", **more)
    assert expected_bytes(config) == pytest.approx(build_engine(config).memory_bytes, rel=0.02)


@pytest.mark.parametrize("backend", ["paged", "slotted"])
def test_the_configured_kind_is_made(backend: str) -> None:
    memory = memory_of(kv_cache_backend=backend)
    for cache in (memory.make(DRAFT), memory.make_target()):
        assert (cache.block_size == memory.limits.max_model_len == cache.max_len) == (backend == "slotted")


@pytest.mark.parametrize("keep", [True, False])
def test_prefixes_are_kept_if_so_configured(keep: bool) -> None:
    cache = memory_of(enable_prefix_caching=keep, block_size=4).make_target()
    cache.reserve(1, 8)
    cache.insert_prefix(1, [5] * 8)
    assert cache.match_prefix(2, [5] * 8) == (7 if keep else 0)


def refused(make: Any) -> CapacityError:
    with pytest.raises(CapacityError) as caught:
        make()
    return caught.value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("with_draft", [False, True])
def test_too_little_memory_is_refused_with_a_length_that_fits(backend: str, with_draft: bool) -> None:
    def make(max_model_len: int) -> None:
        limits = Limits(max_model_len, 3, 8)
        memory = memory_of(limits, kv_cache_backend=backend, kv_memory=15_000, block_size=16)
        if with_draft:
            memory.make(DRAFT)
        memory.make_target()

    error = refused(lambda: make(100))
    assert re.search(r"positions of keys and values need \d.* its share of the memory is \d.* MiB", error.problem)
    assert ("lower max_num_seqs" in error.fix) == (backend == "slotted")
    (longest,) = re.findall(r"set max_model_len to (\d+) or less", error.fix)
    make(int(longest))
    refused(lambda: make(int(longest) + 1))


def test_memory_for_nothing_is_refused_without_naming_a_length() -> None:
    memory = memory_of(kv_memory=100)
    assert refused(memory.make_target).fix == "raise kv_memory."


GIB = 2**30
V1 = "4:memory:/outer/inner\n3:cpu,cpuacct:/outer\n0::/\n"
V2 = "0::/outer/inner\n"


def write_group(folder: Path, version: int, limit: str, usage: int, cached: int) -> None:
    """Write the files of a control group; half of its cached pages are active ones."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    prefix = "total_" if version == 1 else ""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"anon 7\n{prefix}inactive_file {cached // 2}\n{prefix}active_file {cached // 2}\n"
    )


@pytest.fixture(params=[1, 2])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def root(version: int, tmp_path: Path) -> Path:
    """A file system of a machine with 9 GiB free and a process in the group /outer/inner."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {9 * 2**20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text({1: V1, 2: V2}[version])
    return tmp_path


def tree(root: Path, version: int) -> Path:
    return root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ((str(4 * GIB), GIB, 0), ("max", GIB, 0), 3 * GIB),
        ((str(4 * GIB), 3 * GIB, 2 * GIB), ("max", GIB, 0), 3 * GIB),  # pages of files can be given up
        ((str(4 * GIB), GIB, 0), (str(3 * GIB), 2 * GIB, 0), GIB),  # the outer group has less
        ((str(4 * GIB), 5 * GIB, 0), ("max", 0, 0), 0),  # over its limit
        (("max", GIB, 0), (str(20 * GIB), GIB, 0), 9 * GIB),  # the machine has less
        (("max", GIB, 0), ("max", GIB, 0), 9 * GIB),
    ],
)
def test_free_memory_obeys_control_groups(
    root: Path, version: int, inner: tuple[str, int, int], outer: tuple[str, int, int], expected: int
) -> None:
    unlimited = "9223372036854771712" if version == 1 else "max"
    for path, (limit, usage, cached) in {"outer/inner": inner, "outer": outer}.items():
        write_group(tree(root, version) / path, version, unlimited if limit == "max" else limit, usage, cached)
    assert free_memory(torch.device("cpu"), root) == expected


def test_free_memory_in_a_container_with_its_own_root(root: Path, version: int) -> None:
    """The path is the host's and the files are those of the container's own group."""
    write_group(tree(root, version), version, str(2 * GIB), GIB // 2, 0)
    assert free_memory(torch.device("cpu"), root) == 3 * GIB // 2


def test_free_memory_without_limits_is_the_machine_s(root: Path, version: int) -> None:
    assert free_memory(torch.device("cpu"), root) == 9 * GIB


def test_free_memory_is_the_machine_s_figure_or_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory(torch.device("cpu")) > 0

    def unreadable(*arguments: Any, **options: Any) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert free_memory(torch.device("cpu")) == FALLBACK


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft", [DRAFT, None], ids=["drafter", "none"])
def test_an_unset_context_is_the_longest_that_fits(backend: str, draft: CacheShape | None) -> None:
    """It is the model's own if memory allows, else the length that fits for one sequence; with slots, for each one."""
    own = Limits(1000, 2, 8)
    both = TARGET.bytes_per_token + (draft.bytes_per_token if draft else 0)
    sequences = 2 if backend == "slotted" else 1
    for room, expected in ((1000, 1000), (480, 480)):
        budget = sequences * room * both
        memory = memory_of(own, kv_cache_backend=backend, kv_memory=budget, block_size=8, max_model_len=None)
        caches = [memory.make(draft)] if draft else []
        caches.append(memory.make_target())
        assert memory.limits == Limits(expected, 2, 8)
        assert all(positions(cache) >= sequences * expected for cache in caches)


def test_the_context_is_described_with_its_reason() -> None:
    lowered = memory_of(Limits(1000, 2, 8), kv_memory=480 * TARGET.bytes_per_token, block_size=8, max_model_len=None)
    lowered.make_target()
    assert lowered.context(1000).startswith("480 tokens and not the model's 1000")
    assert "raise kv_memory" in lowered.context(1000)
    assert memory_of(Limits(1000, 2, 8), max_model_len=None).context(1000) == "1000 tokens"
    assert "by max_model_len" in memory_of(Limits(60, 2, 8)).context(1000)


def test_long_context_does_not_multiply_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting requires eight sequences of this length: there is room for one, and for all at the usual length."""
    monkeypatch.setattr(memory_module, "USUAL_CONTEXT", 64)
    for own, sequences, expected in ((1000, 3, 1008), (1000, 20, 20 * 64), (48, 3, 3 * 48)):
        memory = memory_of(Limits(own, sequences, 100), block_size=16, max_model_len=None)
        assert positions(memory.make_target()) == expected
        assert memory.limits.max_model_len == own


# --- sources


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_planned_for_a_source_beside_each_text(backend: str) -> None:
    """Three texts of 48 positions, and three sources of 30, in blocks of 16 or in slots."""
    limits = Limits(max_model_len=48, max_num_seqs=3, max_num_batched_tokens=32)
    config = EngineConfig(model="m", max_model_len=48, kv_cache_backend=backend, block_size=16)
    memory = CacheMemory.of(config, limits, TARGET, has_source=True)
    caches = [memory.make(DRAFT), memory.make_target()]
    assert [positions(cache) for cache in caches] == [3 * (48 + 32) if backend == "paged" else 6 * 48] * 2
    assert memory.context(1000) == "48 tokens, sources 30, by max_model_len; the model has 1000"


@given(
    backend=st.sampled_from(BACKENDS),
    kv_memory=st.integers(1, 500_000),
    block_size=st.integers(1, 40),
    context=st.integers(2, 200) | st.none(),
    rows=st.integers(3, 100),
)
def test_a_text_and_its_source_of_the_greatest_lengths_fit(
    backend: str, kv_memory: int, block_size: int, context: int | None, rows: int
) -> None:
    """Or the configured context is refused, with one that fits."""

    def memory_for(length: int | None) -> CacheMemory:
        config = EngineConfig(
            model="m", kv_memory=kv_memory, block_size=block_size, kv_cache_backend=backend, max_model_len=length
        )
        return CacheMemory.of(config, Limits(length or 10_000, 2, rows), TARGET, has_source=True)

    memory = memory_for(context)
    try:
        cache = memory.make_target()
    except CapacityError as error:
        fits = re.search(r"set max_model_len to (\d+)", error.fix)
        assume(fits is not None)
        memory = memory_for(int(fits[1]) if fits else None)
        cache = memory.make_target()
    limits, plan = memory.limits, ReservationPlan(cache)
    assert positions(cache) * TARGET.bytes_per_token <= kv_memory
    assert plan.take(-1, limits.max_source_len)
    assert plan.take(1, limits.max_model_len)


# --- layers with a window

SLIDING = replace(TARGET, windows=(None, *(16,) * 5))  # 5 of 6 layers see 16 positions
ALL_SLIDING = replace(TARGET, windows=(16,) * 6)


def allocated(cache: KVCache) -> int:
    storage: Any = cache.storage
    return sum(part.nbytes for part in storage._data)


@given(
    windows=st.lists(st.sampled_from([None, 1, 7, 16, 1000]), min_size=3, max_size=3),
    draft_windows=st.lists(st.sampled_from([None, 3, 16]), min_size=2, max_size=2),
    kv_memory=st.integers(1, 300_000),
    block_size=st.integers(1, 20),
    max_model_len=st.integers(1, 200),
    max_num_seqs=st.integers(1, 4),
)
def test_groups_fit_into_the_budget(
    windows: list[int | None],
    draft_windows: list[int | None],
    kv_memory: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
) -> None:
    """No other number of blocks would be nearer to the budget, and one sequence of max_model_len fits."""
    target, draft = replace(shape(3), windows=tuple(windows)), replace(shape(2), windows=tuple(draft_windows))
    memory = memory_of(Limits(max_model_len, max_num_seqs, 8), target, kv_memory=kv_memory, block_size=block_size)
    try:
        draft_cache, target_cache = memory.make(draft), memory.make_target()
    except CapacityError:
        assume(False)
    used = allocated(draft_cache) + allocated(target_cache)
    assert used <= kv_memory
    assert kv_memory - used < block_size * (target.bytes_per_token + draft.bytes_per_token), "memory lies idle"
    for cache, group in ((draft_cache, draft.groups[0]), (target_cache, target.groups[0])):
        assert group.window is not None or positions(cache) >= max_model_len


def test_a_window_leaves_room_for_more_positions() -> None:
    """Of 100 positions in 6 layers, 5 layers need blocks for three sequences of 16 positions alone."""
    plain, sliding = (
        memory_of(kv_memory="1MiB", target=each, block_size=4).make_target() for each in (TARGET, SLIDING)
    )
    rows, per_sequence = LIMITS.max_num_batched_tokens, (16 + 2 * 4 - 3) // 4
    windowed = 3 * (per_sequence + 2) + rows // 4
    assert sliding.pools[1].num_blocks == windowed
    left = 2**20 // (4 * TARGET.bytes_per_token // 6) - 5 * windowed
    assert sliding.num_blocks == left > 5 * plain.num_blocks


def test_layers_of_one_window_hold_any_length() -> None:
    """A sequence gives back all but its window, so memory for one window is enough."""
    limits = Limits(max_model_len=10**6, max_num_seqs=2, max_num_batched_tokens=8)
    need = Need(ALL_SLIDING, 4, 1, 8)
    enough = need.bytes_of(need.blocks_for(10**6))
    memory = memory_of(limits, ALL_SLIDING, kv_memory=enough, block_size=4, max_model_len=None)
    cache = memory.make_target()
    assert (memory.limits.max_model_len, cache.num_blocks) == (10**6, (16 + 2) // 4 + 1 + 2 + 2)
    for length in range(8, 1000, 8):
        cache.reserve(1, 8)
        cache.drop_unseen(1)
        assert cache.length(1) == length
    refused(memory_of(limits, ALL_SLIDING, kv_memory=enough - 1, block_size=4).make_target)


def test_slots_keep_all_positions_of_layers_with_a_window() -> None:
    memory = memory_of(kv_cache_backend="slotted", target=SLIDING)
    cache = memory.make_target()
    assert allocated(cache) == 3 * 100 * TARGET.bytes_per_token


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refusal_names_the_cache_whose_share_is_short(backend: str) -> None:
    arguments: dict[str, Any] = {"kv_cache_backend": backend, "kv_memory": 1000}
    with pytest.raises(CapacityError, match=r"^the target's cache: .* and its share of the memory is"):
        memory_of(**arguments).make_target()
    with pytest.raises(CapacityError, match=r"^the drafter's cache: "):
        memory_of(**arguments).make(DRAFT)
