"""A file of packed weights: written once, checked whole, and mapped, so that processes share the memory.

[ weights, each at a multiple of 64 bytes ][ table: JSON ][ end: length and checksum of the table, MAGIC ]

The table has the origin of the weights (`facts`) and a checksum of each. A file is used only if no byte has changed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from speculant.kernels import ALIGNMENT, Kernels, Type, Weight

MAGIC = b"speculant-weight"
END = struct.Struct("<QQ16s")
PIECE = 2**23  # bytes that are written at once


class DamagedFileError(Exception):
    """A file has changed since it was written, or has another origin."""


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

    Raises DamagedFileError if it has changed since it was written, has another origin or belongs to another user, and
    OSError if it can't be read.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise DamagedFileError("it belongs to another user")
        if status.st_size < END.size:
            raise DamagedFileError("it is too short")
        memory = _as_tensor(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ))
    try:
        return _read(memory, facts, kernels)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFileError("its table is not valid") from error


def _as_tensor(pages: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that nothing may write to it
        return torch.frombuffer(pages, dtype=torch.uint8)


def _read(memory: Tensor, facts: Sequence[str], kernels: Kernels) -> dict[str, Weight]:
    table, data = _table(memory)
    if table["facts"] != list(facts):
        raise DamagedFileError("it was made of something else")
    return {name: _weight(data, name, entry, kernels) for name, entry in table["weights"].items()}


def _table(memory: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Return the table, and the memory before it."""
    length, digest, magic = END.unpack(bytes(memory[-END.size :].tolist()))
    data = len(memory) - END.size - length
    if magic != MAGIC or data < 0:
        raise DamagedFileError("it does not end as such a file does")
    table = memory[data : data + length].numpy().tobytes()
    if _digest(table) != digest:
        raise DamagedFileError("its table has changed")
    content: dict[str, Any] = json.loads(table)
    return content, memory[:data]


def _weight(data: Tensor, name: str, entry: Sequence[int], kernels: Kernels) -> Weight:
    place, size, type_, n, k, checksum = entry
    memory = data[place : place + size]
    if len(memory) != size or place % ALIGNMENT or kernels.checksum(memory) != checksum:
        raise DamagedFileError(f"{name} has changed")
    return Weight(memory, Type(type_), n, k)


def _digest(table: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(table, digest_size=8).digest(), "little")
