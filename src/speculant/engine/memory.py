"""How the memory for keys and values is shared out among the target's cache and the drafter's.

All caches hold about the same number of positions, so that a sequence that fits the target's fits the draft's:

    kv_memory   [ target: n blocks x target bytes | draft: n blocks x draft bytes ]
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.factory import paged_cache, slotted_cache
from speculant.config import EngineConfig, Limits
from speculant.engine.cgroups import free_in_cgroups
from speculant.errors import CapacityError

logger = logging.getLogger(__name__)

SHARE_OF_FREE = 0.5  # of the memory that is free once the target is loaded, unless kv_memory says otherwise
FALLBACK = 2**31  # bytes, where the free memory can't be asked for


class CacheMemory:
    """Makes caches within a budget of bytes; the drafter's first, the target's takes what is left."""

    def __init__(self, config: EngineConfig, limits: Limits, target: CacheShape, budget: int) -> None:
        self._config, self._limits, self._target = config, limits, target
        self._left = budget
        self.made: list[KVCache] = []

    @classmethod
    def of(cls, config: EngineConfig, limits: Limits, target: CacheShape, mapped: int = 0) -> CacheMemory:
        """Take the configured budget, or a share of what is free. mapped: bytes of weights that count as free."""
        free = int(SHARE_OF_FREE * max(0, free_memory(target.device) - mapped))
        return cls(config, limits, target, config.kv_memory_bytes() or free)

    def make_target(self) -> KVCache:
        """Make the target's cache of all that is left; CapacityError if not one sequence of max_model_len fits."""
        return self._make(self._target, self._left, "target")

    def make(self, shape: CacheShape) -> KVCache:
        """Make a cache for a drafter, leaving room for as many of the target's positions; CapacityError likewise."""
        both = shape.bytes_per_token + self._target.bytes_per_token
        return self._make(shape, self._left * shape.bytes_per_token // both, "drafter")

    def _make(self, shape: CacheShape, share: int, whose: str) -> KVCache:
        make = self._make_paged if self._config.kv_cache_backend == "paged" else self._slotted
        cache = make(shape, share, whose)
        size = cache.num_blocks * cache.block_size * shape.bytes_per_token
        self._left -= size
        logger.info(
            "%s cache: %d blocks of %d positions, %.1f MiB",
            self._config.kv_cache_backend, cache.num_blocks, cache.block_size, size / 2**20,
        )  # fmt: skip
        self.made.append(cache)
        return cache

    def _make_paged(self, shape: CacheShape, share: int, whose: str) -> KVCache:
        size, limits = self._config.block_size, self._limits
        per_sequence = -(-limits.max_model_len // size)
        num_blocks = share // (size * shape.bytes_per_token)
        if num_blocks < per_sequence:
            raise self._too_small(shape, share, whose, 1, size)
        if self._config.kv_memory_bytes() is None:
            num_blocks = min(num_blocks, limits.max_num_seqs * per_sequence)
        return paged_cache(shape, num_blocks, size, self._config.enable_prefix_caching)

    def _slotted(self, shape: CacheShape, share: int, whose: str) -> KVCache:
        limits = self._limits
        if limits.max_num_seqs * limits.max_model_len * shape.bytes_per_token > share:
            raise self._too_small(shape, share, whose, limits.max_num_seqs, 1)
        return slotted_cache(shape, limits.max_num_seqs, limits.max_model_len)

    def _too_small(self, shape: CacheShape, share: int, whose: str, num_seqs: int, block_size: int) -> CapacityError:
        longest, mib = self._limits.max_model_len, 2**20
        needed = num_seqs * longest * shape.bytes_per_token
        fits = share // (num_seqs * shape.bytes_per_token) // block_size * block_size
        fewer = "" if num_seqs == 1 else ", lower max_num_seqs"
        shorter = f", or set max_model_len to {fits} or less" if fits else ""
        return CapacityError(
            f"the {whose}'s cache: {num_seqs} x {longest} positions of keys and values need {needed / mib:.1f} MiB "
            f"and its share of the memory is {share / mib:.1f} MiB",
            f"raise kv_memory{fewer}{shorter}.",
        )


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
