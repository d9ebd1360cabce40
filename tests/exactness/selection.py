"""Selections by hand of the combinations of parameters that `make test` runs, where a covering one takes too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest


def combinations(quick: Callable[..., bool], *values: Iterable[Any]) -> list[Any]:
    """Return all combinations of values, to parametrise a test with; those that `quick` refuses are slow."""
    return [pytest.param(*each, marks=() if quick(*each) else pytest.mark.slow) for each in product(*values)]


def slow_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of a parameter, or tuples of several ones; those that are not in `quick` are slow."""
    kept = [*quick]
    return [
        value
        if value in kept
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
