"""The start cache: packed weights on disk, so that the next start maps them instead of packing the checkpoint again.

[ weights, each at a multiple of 64 bytes ][ table: JSON ][ end: length and checksum of the table, MAGIC ]

The table has the origin of the weights (`facts`) and a checksum of each. A file is used only if no byte has changed.
Processes that map it share the memory.

A file is written to a temporary name and renamed when all of it is on the disk. Its writer holds a lock; a temporary
file without one was left by a process that died. No error here stops a start: weights that can't be read are packed
again, weights that can't be written are not kept, and a warning is logged once. The default folder is only read where
its files would be lost with memory, a container or a pod.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speculant import __version__
from speculant.files import cache_folder, lost_with
from speculant.kept_files import (
    HEX,
    KeptFile,
    UnusableFileError,
    delete,
    entries_of,
    oldest,
    open_kept,
    remove_abandoned,
    replacing,
)
from speculant.kernels import ALIGNMENT, Kernels, Type, Weight, library_path
from speculant.models import background

logger = logging.getLogger(__name__)

MAGIC = b"speculant-weight"
END = struct.Struct("<QQ16s")
PIECE = 2**23  # bytes that are written at once


def write_weights(file: BinaryIO, facts: Sequence[str], weights: Mapping[str, Weight], kernels: Kernels) -> None:
    """Write the weights of a model, by name. Raises OSError."""
    entries, place = dict[str, list[int]](), 0
    for name, weight in weights.items():
        memory = weight.memory
        entries[name] = [place, len(memory), weight.type, weight.n, weight.k, kernels.checksum(memory)]
        file.writelines(memory[first : first + PIECE].numpy().data for first in range(0, len(memory), PIECE))
        padding = -len(memory) % ALIGNMENT
        file.write(bytes(padding))
        place += len(memory) + padding
    table = json.dumps({"facts": list(facts), "weights": entries}).encode()
    file.write(table + END.pack(len(table), _digest(table), MAGIC))


def map_weights(path: Path, facts: Sequence[str], kernels: Kernels) -> dict[str, Weight]:
    """Return the weights of a file by name, mapped for reading.

    Raises UnusableFileError if it has changed since it was written or has another origin, and OSError if it can't be
    read or belongs to another user.
    """
    with open_kept(path) as file:
        if os.fstat(file.fileno()).st_size < END.size:
            raise UnusableFileError("it is too short")
        memory = _as_tensor(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))
    try:
        return _read(memory, facts, kernels)
    except UnusableFileError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise UnusableFileError("its table is not valid") from error


def _as_tensor(pages: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing may write to it
        return torch.frombuffer(pages, dtype=torch.uint8)


def _read(memory: Tensor, facts: Sequence[str], kernels: Kernels) -> dict[str, Weight]:
    table, data = _table(memory)
    if table["facts"] != list(facts):
        raise UnusableFileError("it was made of something else")
    return {name: _weight(data, name, entry, kernels) for name, entry in table["weights"].items()}


def _table(memory: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the table, and the memory before it."""
    length, digest, magic = END.unpack(bytes(memory[-END.size :].tolist()))
    data = len(memory) - END.size - length
    if magic != MAGIC or data < 0:
        raise UnusableFileError("it does not end as such a file does")
    table = memory[data : data + length].numpy().tobytes()
    if _digest(table) != digest:
        raise UnusableFileError("its table has changed")
    content: dict[str, Any] = json.loads(table)
    return content, memory[:data]


def _weight(data: Tensor, name: str, entry: Sequence[int], kernels: Kernels) -> Weight:
    place, size, type_, n, k, checksum = entry
    memory = data[place : place + size]
    if len(memory) != size or place % ALIGNMENT or kernels.checksum(memory) != checksum:
        raise UnusableFileError(f"{name} has changed")
    return Weight(memory, Type(type_), n, k)


def _digest(table: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(table, digest_size=8).digest(), "little")


GIB = 2**30
FORMAT = 2  # of the files, and of packed matrices
SUFFIX = ".weights"
LIMIT_BYTES = 16 * GIB  # of all files; the newest one stays, whatever its size
LEAST_BYTES = 64 * 2**20  # a smaller model is packed in no time
FREE_BYTES = GIB  # that are left on the disk
THREAD = "speculant-weight-cache"
MAPPED, PACKED, KEPT = "mapped from the cache", "packed", "packed, and written to the cache"


@dataclass(frozen=True)
class WeightCache:
    """A folder of packed weights, for one instruction set."""

    folder: Path
    kernels: Kernels

    def path(self, facts: Sequence[str]) -> Path:
        """Return the file of a model's weights, which may not exist."""
        return self.folder / (hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32] + SUFFIX)

    def find(self, facts: Sequence[str]) -> dict[str, Weight] | None:
        """Return the mapped weights with these facts; None if there are none. A damaged file is deleted."""
        path = self.path(facts)
        try:
            remove_abandoned(self.folder)
            found = map_weights(path, facts, self.kernels)
            os.utime(path)  # it was used now, so other files are deleted first
        except FileNotFoundError:
            return None
        except UnusableFileError as error:
            logger.warning("%s is not used, and its weights are packed again: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        except (OSError, ValueError) as error:
            say_once(f"cached weights in {self.folder} can't be read, and the start goes on without them: {error}")
            return None
        return found

    def accepts(self, size: int) -> bool:
        """Whether to write a file of this size; the answer is logged."""
        lost = self.folder == cache_folder("weights") and lost_with(self.folder)
        if lost:
            logger.info("packed weights are not kept: %s would be lost with this %s", self.folder, lost)
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            say_once(f"weights can't be kept in {self.folder}, and each start packs them: {error}")
            return False
        if free < size + FREE_BYTES:
            room = f"{free / GIB:.2g} GiB are free there, and {(size + FREE_BYTES) / GIB:.2g} are needed"
            say_once(f"packed weights are not kept in {self.folder}: {room}")
            return False
        off = 'turn this off by --weight-cache off (in Python weight_cache="off")'
        say_once(f"packed weights, {size / GIB:.2g} GiB, are written to {self.folder} for later starts; {off}")
        return True

    def keep(self, facts: Sequence[str], weights: Mapping[str, Weight]) -> None:
        """Write weights to the disk, and delete the least recently used files if all take too much."""
        try:
            with replacing(self.path(facts)) as file:
                write_weights(file, facts, weights, replace(self.kernels, threads=1))
            others = [each for each in cache_files(self.folder) if each.path != self.path(facts)]
            delete(oldest(others, LIMIT_BYTES - self.path(facts).stat().st_size))
        except OSError as error:
            say_once(f"weights can't be kept in {self.folder}, and each start packs them: {error}")


@dataclass
class WeightStore:
    """The packed weights of one model: those that the cache has, and those that were packed."""

    cache: WeightCache
    facts: Sequence[str]
    mapped: dict[str, Weight] = field(init=False)
    made: dict[str, Weight] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = [f"format {FORMAT}", f"user {os.geteuid()}", __version__, _library_digest(), self.cache.kernels.layout]
        self.facts = [*own, *self.facts]
        self.mapped = self.cache.find(self.facts) or {}

    @property
    def mapped_bytes(self) -> int:
        """How much of the model lies in mapped memory, which the system counts as free."""
        return sum(len(weight.memory) for weight in self.mapped.values())

    def get(self, name: str, type_: Type, n: int, k: int) -> Weight | None:
        """Return a matrix of the cache; None = it has to be packed."""
        found = self.mapped.get(name)
        return found if found is not None and (found.type, found.n, found.k) == (type_, n, k) else None

    def add(self, name: str, weight: Weight) -> Weight:
        """Add a matrix that was packed, and return it."""
        self.made[name] = weight
        return weight

    def keep(self) -> str:
        """Write the packed weights in a thread. Returns the origin of the weights."""
        if not self.made:
            return MAPPED
        weights, self.made = {**self.mapped, **self.made}, {}
        size = sum(len(weight.memory) for weight in weights.values())
        if size < LEAST_BYTES or not self.cache.accepts(size):
            return PACKED
        background.start(threading.Thread(target=self._keep, args=(weights,), name=THREAD))
        return KEPT

    def _keep(self, weights: Mapping[str, Weight]) -> None:
        if sys.platform == "linux":
            with suppress(OSError):  # of this thread alone: the model is running
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        started = time.perf_counter()
        self.cache.keep(self.facts, weights)
        logger.info("kept packed weights in %s in %.1f s", self.cache.folder, time.perf_counter() - started)


def cache_files(folder: Path) -> list[KeptFile]:
    """Return the files of a cache, the one that was used longest ago first."""
    return entries_of(folder.glob(HEX * 32 + SUFFIX), "weights")


@functools.cache
def say_once(text: str) -> None:
    """Log a warning the first time."""
    logger.warning("%s", text)


@functools.cache
def _library_digest() -> str:
    """Return a digest of the code that packs weights."""
    path = library_path()
    return hashlib.blake2b(path.read_bytes() if path else b"", digest_size=16).hexdigest()
