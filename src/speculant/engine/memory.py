"""How the target's cache and the drafter's share the memory for keys and values.

All caches hold about the same number of positions, so that a sequence that fits the target's fits the draft's:

    kv_memory   [ target: n blocks x target bytes | draft: n blocks x draft bytes ]

The target's passes keep scratch memory in addition to weights and cache. It is not part of kv_memory. Without
kv_memory the caches get a share of the memory that is free after the scratch memory is counted:

    free        [ mapped weights | scratch | share of the rest: caches | the draft's weights and scratch ]
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from speculant.cache.base import CacheShape, KVCache
from speculant.cache.factory import paged_cache, slotted_cache
from speculant.config import EngineConfig, Limits
from speculant.engine.cgroups import free_in_cgroups
from speculant.errors import CapacityError

logger = logging.getLogger(__name__)

SHARE_OF_FREE = 0.5  # of the memory that is free once the target is loaded, unless kv_memory is set
USUAL_CONTEXT = 4096  # positions per sequence that memory is set aside for, unless max_model_len or kv_memory is set
FALLBACK = 2**31  # bytes, where the free memory is unknown


class CacheMemory:
    """Makes caches within a budget of bytes: the drafter's first, then the target's from the rest.

    limits: their context is lowered to the length that fits, unless the configuration has set it.
    """

    def __init__(self, config: EngineConfig, limits: Limits, target: CacheShape, budget: int) -> None:
        self._config, self.limits, self._target = config, limits, target
        self._left = self._budget = budget
        self.made: list[KVCache] = []

    @classmethod
    def of(
        cls, config: EngineConfig, limits: Limits, target: CacheShape, mapped: int = 0, scratch: int = 0
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
        return cls(config, limits, target, given or int(SHARE_OF_FREE * free))

    def make_target(self) -> KVCache:
        """Make the target's cache of all that is left; CapacityError if not one sequence of max_model_len fits."""
        return self._make(self._target, self._left, "target")

    def make(self, shape: CacheShape) -> KVCache:
        """Make a cache for a drafter, leaving room for as many positions of the target's; raises CapacityError too."""
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
        size = self._config.block_size
        num_blocks = share // (size * shape.bytes_per_token)
        self._shorten(num_blocks * size)
        per_sequence = -(-self.limits.max_model_len // size)
        if num_blocks < per_sequence:
            raise self._too_small(shape, share, whose, 1, size)
        if self._config.kv_memory_bytes() is None:
            usual = per_sequence if self._config.max_model_len else min(per_sequence, -(-USUAL_CONTEXT // size))
            num_blocks = min(num_blocks, max(per_sequence, self.limits.max_num_seqs * usual))
        return paged_cache(shape, num_blocks, size, self._config.enable_prefix_caching)

    def _slotted(self, shape: CacheShape, share: int, whose: str) -> KVCache:
        self._shorten(share // (self.limits.max_num_seqs * shape.bytes_per_token))
        limits = self.limits
        if limits.max_num_seqs * limits.max_model_len * shape.bytes_per_token > share:
            raise self._too_small(shape, share, whose, limits.max_num_seqs, 1)
        return slotted_cache(shape, limits.max_num_seqs, limits.max_model_len)

    def _shorten(self, positions: int) -> None:
        """Lower the context to the positions that a sequence can have in a cache, unless it was configured."""
        if self._config.max_model_len is None and 1 < positions < self.limits.max_model_len:
            self.limits = replace(self.limits, max_model_len=positions)

    def context(self, max_positions: int) -> str:
        """Return the longest length of a sequence in words, with the reason if it is shorter than the model allows."""
        longest = self.limits.max_model_len
        if longest == max_positions:
            return f"{longest} tokens"
        if self._config.max_model_len is not None:
            return f"{longest} tokens, by max_model_len; the model has {max_positions}"
        return (
            f"{longest} tokens and not the model's {max_positions}: the memory for keys and values has "
            f"{self._budget / 2**20:.1f} MiB; raise kv_memory for more"
        )

    def _too_small(self, shape: CacheShape, share: int, whose: str, num_seqs: int, block_size: int) -> CapacityError:
        longest, mib = self.limits.max_model_len, 2**20
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
