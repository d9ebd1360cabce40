"""What several tests of models share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from speculant import plugins


@pytest.fixture(scope="module")
def families_are_looked_up_once() -> Iterator[None]:
    """Looking through the package for families takes longer than loading a small model of one layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "names", functools.cache(plugins.names))
        patch.setattr(plugins, "load", functools.cache(plugins.load))
        yield
