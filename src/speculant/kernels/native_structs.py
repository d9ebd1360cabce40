"""The structures of csrc/speculant.h that distributions and drafts take."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int64, c_void_p
from typing import Any, ClassVar

from speculant.kernels.base import SamplingSettings


class SpSamplingSettings(Structure):
    """`SamplingSettings` in the library's layout; the fields have the same order."""

    _fields_: ClassVar[Any] = [
        ("temperature", c_double), ("top_p", c_double), ("min_p", c_double), ("top_k", c_int64),
    ]  # fmt: skip


class SpEdits(Structure):
    """Changes to a row's logits before its distribution is computed; csrc/speculant.h has the order."""

    _fields_: ClassVar[Any] = [
        ("allowed", c_void_p), ("words", c_int64), ("masked", c_int64),
        ("biased", c_void_p), ("biases", c_void_p), ("num_biased", c_int64),
        ("banned", c_void_p), ("num_banned", c_int64), ("ban_below", c_int64),
        ("seen", c_void_p), ("counts", c_void_p), ("num_seen", c_int64),
        ("drafted", c_void_p), ("num_drafted", c_int64),
        ("penalises", c_int64), ("repetition", c_float), ("presence", c_float), ("frequency", c_float),
    ]  # fmt: skip


def settings_array(settings: Sequence[SamplingSettings]) -> ctypes.Array[SpSamplingSettings]:
    """Return settings in the library's layout."""
    return (SpSamplingSettings * len(settings)).from_buffer_copy(b"".join(map(_packed, settings)))


@functools.lru_cache(maxsize=1024)
def _packed(settings: SamplingSettings) -> bytes:
    return bytes(SpSamplingSettings(*settings))


class Draft(Structure):
    """The arguments of `Kernels.draft`: the `SpDraft` of csrc/speculant.h."""

    _fields_: ClassVar[Any] = [
        ("sequences", c_int64), ("steps", c_int64), ("width", c_int64),
        ("limits", c_void_p), ("settings", c_void_p), ("edits", c_void_p), ("noise", c_void_p),
        ("chances", c_void_p), ("drawn", c_void_p), ("out", c_void_p), ("stop_below", c_double),
        ("num_logits", c_int64), ("head_tokens", c_void_p),
        ("carried", c_void_p), ("states", c_void_p), ("state_size", c_int64),
    ]  # fmt: skip
