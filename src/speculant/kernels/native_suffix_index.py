"""The suffix automaton of the native library (csrc/suffix.cpp); its results equal those of the reference."""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from typing import Any

from speculant.kernels.native import address, load_library
from speculant.kernels.suffix_index import Continuation, SuffixSettings

_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("sp_suffix_new", c_void_p, [c_int64, c_double, c_double]),
    ("sp_suffix_delete", None, [c_void_p]),
    ("sp_suffix_begin", None, [c_void_p]),
    ("sp_suffix_extend", c_int, [c_void_p, c_void_p, c_int64]),
    ("sp_suffix_continuation", c_int64, [c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 3]),
    ("sp_suffix_bytes", c_int64, [c_void_p]),
)


class NativeSuffixIndex:
    """See `SuffixIndex`. The library owns the memory for the life of this object."""

    def __init__(self, library: ctypes.CDLL, settings: SuffixSettings) -> None:
        self._library, self._depth = library, settings.depth
        self._tokens = array("q", bytes(16 * settings.depth))  # the best continuation, and a candidate
        self._ratios = array("d", bytes(16 * settings.depth))
        self._length = array("q", [0])
        self._results = address(self._tokens), address(self._ratios), address(self._length)
        self._index = library.sp_suffix_new(settings.depth, settings.factor, settings.min_prob)
        if self._index is None:
            raise MemoryError("no memory for a suffix index")
        weakref.finalize(self, library.sp_suffix_delete, self._index)

    def begin(self) -> None:
        """See `SuffixIndex.begin`."""
        self._library.sp_suffix_begin(self._index)

    def extend(self, tokens: Sequence[int]) -> None:
        """See `SuffixIndex.extend`."""
        given = array("q", tokens)
        if not self._library.sp_suffix_extend(self._index, address(given), len(given)):
            raise MemoryError(f"no memory for {len(given)} more tokens in a suffix index")

    def continuation(self, context: Sequence[int], limit: int) -> Continuation:
        """See `SuffixIndex.continuation`."""
        given = array("q", context[-self._depth :])
        found = self._library.sp_suffix_continuation(self._index, address(given), len(given), limit, *self._results)
        return Continuation(self._tokens[:found].tolist(), self._ratios[:found].tolist(), self._length[0])

    @property
    def num_bytes(self) -> int:
        """See `SuffixIndex.num_bytes`."""
        return int(self._library.sp_suffix_bytes(self._index))


def open_native(settings: SuffixSettings) -> NativeSuffixIndex | None:
    """Return an empty index; None if the library was not built."""
    library = _load()
    return None if library is None else NativeSuffixIndex(library, settings)


@functools.cache
def _load() -> ctypes.CDLL | None:
    library = load_library()
    if library is not None:
        for name, result, arguments in _FUNCTIONS:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    return library
