"""How the target's cache and the drafter's share the memory for keys and values.

All caches hold about the same number of positions, so that a sequence that fits the target's fits the draft's:

    kv_memory   [ target: n blocks x target bytes | draft: n blocks x draft bytes ]

A source is one more sequence in each cache. So with an encoder-decoder model, memory is planned for a source of
`Limits.max_source_len` positions beside each text, in the draft's cache too.

Layers with a sliding window have fewer blocks: as many as can be in use at once. So n is larger for such models.

    target      [ n blocks, layers without a window | up to n blocks, layers with one ]

Sequences of a model with states have records of these (cache/paged.py), two each, and prefixes have more of them:

    kv_memory   [ records | blocks ]

The target's passes keep scratch memory in addition to weights and cache. It is not part of kv_memory. Without
kv_memory the caches get a share of the memory that is free after the scratch memory is counted:

    free        [ mapped weights | scratch | share of the rest: caches | the draft's weights and scratch ]
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from speculant.cache import NO_RECORDS, RECORDS_OF_SEQUENCE, CacheShape, KVCache, paged_cache, slotted_cache
from speculant.config import USUAL_CONTEXT, EngineConfig, Limits
from speculant.errors import CapacityError
from speculant.lengths import DEPTHS

logger = logging.getLogger(__name__)

SHARE_OF_FREE = 0.5  # of the memory that is free once the target is loaded, unless kv_memory is set
LEAST_CONTEXT = 8 * USUAL_CONTEXT  # to which a draft that nobody named may shorten the context
FALLBACK = 2**31  # bytes, where the free memory is unknown
SHARE_OF_PREFIXES, MOST_PREFIXES = 0.25, 8  # of the memory, for the records of prefixes; and how many per sequence


class CacheMemory:
    """Makes caches within a budget of bytes: the drafter's first, then the target's from the rest.

    limits: their context is lowered to the length that fits, unless the configuration has set it. has_source: the
    target is an encoder-decoder model.
    """

    def __init__(
        self, config: EngineConfig, limits: Limits, target: CacheShape, budget: int, has_source: bool = False
    ) -> None:
        self._config, self.limits, self._shape, self._has_source = config, limits, target, has_source
        self._left = self._budget = budget
        self.target: KVCache | None = None  # its cache, once it is made

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        limits: Limits,
        target: CacheShape,
        mapped: int = 0,
        scratch: int = 0,
        has_source: bool = False,
    ) -> CacheMemory:
        """Take the configured budget, or a share of the free memory.

        mapped: bytes of weights that count as free. scratch: bytes that the target's passes will keep.
        """
        free, given = max(0, free_memory(target.device) - mapped - scratch), config.kv_memory_bytes()
        logger.info("scratch memory of the target's passes: at most %.1f MiB", scratch / 2**20)
        if given is not None and given > free:
            logger.warning(
                "kv_memory is %.1f MiB, and %.1f MiB are free beside %.1f MiB of scratch memory: lower kv_memory,"
                " max_model_len or max_num_batched_tokens",
                given / 2**20, free / 2**20, scratch / 2**20,
            )  # fmt: skip
        return cls(config, limits, target, given or int(SHARE_OF_FREE * free), has_source)

    @property
    def used(self) -> int:
        """The bytes of the caches that were made."""
        return self._budget - self._left

    def make_target(self) -> KVCache:
        """Make the target's cache of all that is left; CapacityError if not one sequence of max_model_len fits."""
        self.target = self._make(self._target_need, self._left, "target")
        return self.target

    def make(self, shape: CacheShape) -> KVCache:
        """Make a cache for a drafter, leaving room for as many positions of the target's; raises CapacityError too."""
        with self.restored_on_error():
            return self._make(self._draft_need(shape), self._left, "drafter", (self._target_need,))

    def make_if_roomy(self, shape: CacheShape) -> KVCache:
        """Make a cache as `make` does; CapacityError too if the context then is shorter than LEAST_CONTEXT for it."""
        with self.restored_on_error():
            longest, cache = self.limits.max_model_len, self.make(shape)
            if self.limits.max_model_len < min(longest, LEAST_CONTEXT):
                raise CapacityError(
                    f"beside its keys and values the context would have {self.limits.max_model_len} tokens",
                    "raise kv_memory.",
                )
            return cache

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Give back the memory of caches that are made in this block, and the context, if it raises an error."""
        limits, left = self.limits, self._left
        try:
            yield
        except BaseException:
            self.limits, self._left = limits, left
            raise

    @property
    def _target_need(self) -> Need:
        rows = self.limits.max_num_batched_tokens
        return self._need(self._shape, self.limits.max_num_seqs, rows)

    def _draft_need(self, shape: CacheShape) -> Need:
        """Return a drafter's need: a sequence keeps a round's input tokens and draft until it is drafted for again."""
        rows = self.limits.max_num_batched_tokens + max(self.limits.max_num_batched_tokens, *DEPTHS)
        num_seqs = self.limits.max_num_seqs
        return self._need(shape, num_seqs, num_seqs * rows, rows)

    def _need(self, shape: CacheShape, num_seqs: int, rows: int, rows_of_one: int | None = None) -> Need:
        """Return what decides the size of a cache, with the records of its states."""
        need = Need(shape, self._config.block_size, num_seqs, rows, rows_of_one)
        if not shape.states:
            return need
        kept = int(SHARE_OF_PREFIXES * self._budget) // shape.state_bytes
        paged = self._config.kv_cache_backend == "paged" and self._config.enable_prefix_caching
        saved = min(kept, MOST_PREFIXES * num_seqs) if paged else 0
        records = RECORDS_OF_SEQUENCE * (num_seqs + 1) + saved
        return replace(need, records=(records, min(saved, num_seqs)))

    def _make(self, need: Need, left: int, whose: str, others: tuple[Need, ...] = ()) -> KVCache:
        make = self._make_paged if self._config.kv_cache_backend == "paged" else self._slotted
        cache, size = make(need, left, whose, others)
        self._left -= size
        logger.info(
            "%s cache: %d blocks of %d positions, %.1f MiB",
            self._config.kv_cache_backend, cache.num_blocks, cache.block_size, size / 2**20,
        )  # fmt: skip
        return cache

    def _make_paged(self, need: Need, left: int, whose: str, others: tuple[Need, ...]) -> tuple[KVCache, int]:
        """Make a cache that leaves room for as many blocks of the others; return it with its bytes."""
        size, num_blocks = self._config.block_size, most_blocks((need, *others), left)
        if num_blocks < self._blocks(need, self.limits.max_model_len):
            self._shorten(self._text_blocks(num_blocks) * size)
        per_sequence = self._blocks(need, self.limits.max_model_len)
        if num_blocks < per_sequence:
            share = left * need.bytes_of(per_sequence) // sum(each.bytes_of(per_sequence) for each in (need, *others))
            raise self._too_small(need.bytes_of(per_sequence), share, whose, 1, self._text_blocks(num_blocks) * size)
        if self._config.kv_memory_bytes() is None:
            usual = self._blocks(need, self.limits.max_model_len if self._config.max_model_len else USUAL_CONTEXT)
            num_blocks = min(num_blocks, max(per_sequence, self.limits.max_num_seqs * usual))
        counts, prefixes = need.counts(num_blocks), self._config.enable_prefix_caching
        cache = paged_cache(need.shape, counts, size, prefixes, need.records)
        return cache, need.bytes_of(num_blocks)

    def _blocks(self, need: Need, length: int) -> int:
        """Return the blocks for a text, and its source if it has one, of the greatest lengths up to `length`."""
        source = min(length, self.limits.max_source_len) if self._has_source else 0
        return need.blocks_for(min(length, self.limits.max_model_len)) + -(-source // need.block_size)

    def _text_blocks(self, num_blocks: int) -> int:
        """Return how many of these blocks the longest text can have: the rest beside the longest source, or half."""
        if not self._has_source:
            return num_blocks
        rows = self.limits.max_num_batched_tokens - self.limits.max_num_seqs + 1  # of the longest source
        return max(num_blocks // 2, num_blocks - -(-rows // self._config.block_size))

    def _slotted(self, need: Need, left: int, whose: str, others: tuple[Need, ...]) -> tuple[KVCache, int]:
        """Make a cache that leaves room for as many slots of the others; return it with its bytes."""
        shape, num_seqs = need.shape, self.limits.max_num_seqs * (2 if self._has_source else 1)
        every = sum(each.shape.bytes_per_token for each in (need, *others))
        left -= sum(each.record_bytes for each in (need, *others))
        share = max(0, left * shape.bytes_per_token // every)
        positions = share // (num_seqs * shape.bytes_per_token)
        self._shorten(positions)
        needed = num_seqs * self.limits.max_model_len * shape.bytes_per_token
        if needed > share:
            raise self._too_small(needed, share, whose, num_seqs, positions)
        return slotted_cache(shape, num_seqs, self.limits.max_model_len), needed

    def _shorten(self, positions: int) -> None:
        """Lower the context to the positions that a sequence can have in a cache, unless it was configured."""
        if self._config.max_model_len is None and 1 < positions < self.limits.max_model_len:
            self.limits = replace(self.limits, max_model_len=positions)

    def context(self, max_positions: int) -> str:
        """Return the longest length of a sequence in words, with the reason if it is shorter than the model allows."""
        longest = self.limits.max_model_len
        tokens = f"{longest} tokens, sources {self.limits.max_source_len}" if self._has_source else f"{longest} tokens"
        if longest == max_positions:
            return tokens
        if self._config.max_model_len is not None:
            return f"{tokens}, by max_model_len; the model has {max_positions}"
        return (
            f"{tokens} and not the model's {max_positions}: the memory for keys and values has "
            f"{self._budget / 2**20:.1f} MiB; raise kv_memory for more"
        )

    def _too_small(self, needed: int, share: int, whose: str, num_seqs: int, fits: int) -> CapacityError:
        """Return the error for a share of the memory that lasts for `fits` positions per sequence."""
        longest, mib = self.limits.max_model_len, 2**20
        fewer = "" if num_seqs == 1 else ", lower max_num_seqs"
        shorter = f", or set max_model_len to {fits} or less" if fits else ""
        sources = " with sources" if self._has_source else ""
        states = f", and states of {self.limits.max_num_seqs} sequences," if self._shape.states else ""
        fewer = ", lower max_num_seqs" if states else fewer
        return CapacityError(
            f"the {whose}'s cache: {num_seqs} x {longest} positions of keys and values{sources}{states} need "
            f"{needed / mib:.1f} MiB and its share of the memory is {share / mib:.1f} MiB",
            f"raise kv_memory{fewer}{shorter}.",
        )


@dataclass(frozen=True)
class Need:
    """What decides the size of a paged cache.

    rows: the most positions that sequences have reserved and not committed, all together; of one sequence
    `rows_of_one`, None = the same. records: how many, and how many a pass may save for prefixes.
    """

    shape: CacheShape
    block_size: int
    num_seqs: int
    rows: int
    rows_of_one: int | None = None
    records: tuple[int, int] = NO_RECORDS

    @property
    def record_bytes(self) -> int:
        """The bytes of all records."""
        return self.records[0] * self.shape.state_bytes

    def counts(self, num_blocks: int) -> list[int]:
        """Return the blocks of each group of layers if the first has `num_blocks`."""
        return [num_blocks, *(min(num_blocks, self._in_use(each.window)) for each in self.shape.groups[1:])]

    def bytes_of(self, num_blocks: int) -> int:
        """Return the bytes of a cache whose first group of layers has `num_blocks`."""
        counts = zip(self.counts(num_blocks), self.shape.groups, strict=True)
        return self.record_bytes + sum(
            count * self.block_size * self.shape.bytes_of(group.layers) for count, group in counts
        )

    def blocks_for(self, length: int) -> int:
        """Return the fewest blocks of the first group with which one sequence can grow to `length` positions."""
        window, blocks = self.shape.groups[0].window, -(-length // self.block_size)
        rows = self.rows if self.rows_of_one is None else self.rows_of_one
        return blocks if window is None else min(blocks, blocks_in_use(window, self.block_size, 1, rows))

    def _in_use(self, window: int | None) -> int:
        assert window is not None, "layers without a window are the first group"
        return blocks_in_use(window, self.block_size, self.num_seqs, self.rows)


def blocks_in_use(window: int, block_size: int, num_seqs: int, rows: int) -> int:
    """Return the most blocks that layers with a window use at once, while sequences have `rows` more positions in all.

    A committed sequence needs its last window - 1 positions, which may begin and end within a block. Its further
    positions may end within a block, and one more block may be copied before it is written.
    """
    committed = -(-(window + block_size - 2) // block_size)
    return num_seqs * (committed + 2) + rows // block_size


def most_blocks(needs: Sequence[Need], budget: int) -> int:
    """Return how many blocks the first group of each of several caches can have within a budget of bytes."""

    def total(num_blocks: int) -> int:
        return sum(need.bytes_of(num_blocks) for need in needs)

    most = budget // sum(each.block_size * each.shape.bytes_of(each.shape.groups[0].layers) for each in needs)
    return max(0, bisect.bisect_right(range(most + 1), budget, key=total) - 1)


def free_memory(device: torch.device, root: Path = Path("/")) -> int:
    """Return the bytes that could be allocated on a device; on the CPU, within the limits of control groups."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    machine, groups = _available(root), free_in_cgroups(root)
    return machine if groups is None else min(machine, groups)


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return FALLBACK
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), FALLBACK)


@dataclass(frozen=True)
class _Version:
    tree: str
    limit: str
    usage: str
    cached: tuple[str, ...]  # entries of memory.stat: pages of files, which the system drops when it needs memory


_V1 = _Version(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def free_in_cgroups(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process's control groups leave it, at least 0; None = no group has a limit.

    Containers set such limits, and /proc/meminfo does not show them:

        /proc/self/cgroup   0::/kubepods/pod1/box                    v2, one hierarchy
                            4:memory:/docker/1f0                     v1, one per controller
        the tree            kubepods/pod1/box, kubepods/pod1, kubepods, root: each may have a limit

    Sources: Linux, admin-guide/cgroup-v2.rst and admin-guide/cgroup-v1/memory.rst. The pages of files of a group
    count as free, as they do in MemAvailable. `root` is the root of the file system, another one in tests.
    """
    free = [each for version, group in _groups(root) for each in _free(version, root / version.tree, group)]
    return max(0, min(free)) if free else None


def _groups(root: Path) -> Iterator[tuple[_Version, str]]:
    """Yield the groups of this process that can limit its memory."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield _V2, group
        elif "memory" in controllers.split(","):
            yield _V1, group


def _free(version: _Version, tree: Path, group: str) -> Iterator[int]:
    """Yield the free bytes of a group and of each group around it. A container may hide the inner part of the path."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    for depth in range(len(parts) + 1):
        folder = tree.joinpath(*parts[:depth])
        limit, usage = _read(folder / version.limit).strip(), _read(folder / version.usage).strip()
        if limit.isdecimal() and usage.isdecimal():
            yield int(limit) - int(usage) + _cached(version, folder)


def _cached(version: _Version, folder: Path) -> int:
    entries = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return sum(int(value) for name, value in entries if name in version.cached)


def _read(path: Path) -> str:
    """Return a file's content, or "" if there is no such file: a group without a limit has none."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
