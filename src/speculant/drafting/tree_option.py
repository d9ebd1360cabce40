"""The option `tree` of drafters that draw trees of a static shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speculant.drafting.topology import StaticTree
from speculant.errors import ConfigError


def read_tree(given: Any) -> StaticTree | None:
    """Read the option `tree`; None stays None."""
    if given is None:
        return None
    error = ConfigError(
        f"tree={given!r} is not the shape of a tree",
        "give children per node at each depth, as [3, 2, 1], or every node's ranks, parents among them: [[0], [0, 0]].",
    )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise error
    if all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in given):
        return StaticTree.of_widths(given)
    if not all(isinstance(path, list | tuple) and path and all(_is_rank(rank) for rank in path) for path in given):
        raise error
    shape = StaticTree(frozenset(tuple(path) for path in given))
    if not shape.is_whole():
        raise error
    return shape


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
