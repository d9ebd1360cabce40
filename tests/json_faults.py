"""Faulty JSON files: strategies for hypothesis."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

EXTREMES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31 - 1, 2**31, 2**62, 2**64, -(2**63), 10**7, 10**400,
    0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"),
    "", "abc", "1", "\x00", "é" * 50, "silu", "default", "dynamic", "llama3", "full_attention", "sliding_attention",
    [], {}, [1], [[2]], [None], {"a": 1}, {"type": "dynamic", "factor": 2.0}, {"rope_type": "linear"},
]  # fmt: skip
values = st.sampled_from(EXTREMES) | st.recursive(
    st.integers() | st.floats() | st.text(max_size=5) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, content: dict[str, Any], keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a copy of an object with one to three entries replaced, removed or added at its top; `keys` are added."""
    result = dict(content)
    names = st.sampled_from(sorted({*content, *keys}))
    for key in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        if draw(st.integers(0, 5)) == 0:
            result.pop(key, None)
        else:
            result[key] = draw(values)
    return result


def paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where the entries of nested objects and lists are; of many alike the first few."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = []
    for key, value in list(entries)[:12]:
        found += [(*path, key), *paths(value, (*path, key))]
    return found


@st.composite
def changed_deep(draw: st.DrawFn, content: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an object with one to three entries at any depth replaced or removed."""
    result = copy.deepcopy(content)
    for path in draw(st.lists(st.sampled_from(paths(content)), min_size=1, max_size=3)):
        _change(draw, result, path)
    return result


def _change(draw: st.DrawFn, content: Any, path: tuple[Any, ...]) -> None:
    try:
        for key in path[:-1]:
            content = content[key]
        if draw(st.integers(0, 4)) == 0:
            del content[path[-1]]
        else:
            content[path[-1]] = draw(values)
    except (LookupError, TypeError):
        return  # another change removed what it is in
