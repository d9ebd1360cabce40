"""Makes suffix indexes: native ones if the library was built, else the reference. Results are equal."""

from __future__ import annotations

from speculant.kernels.native_suffix_index import open_native
from speculant.kernels.suffix_index import SuffixAutomaton, SuffixIndex, SuffixSettings


def open_suffix_index(settings: SuffixSettings) -> SuffixIndex:
    """Return an empty index."""
    return open_native(settings) or SuffixAutomaton(settings)
