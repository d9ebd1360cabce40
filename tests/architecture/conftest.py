"""The package's source is read once for all of these tests, and not kept after them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.architecture.source import load_package


@pytest.fixture(autouse=True, scope="package")
def forget_the_source() -> Iterator[None]:
    """Give the memory of the syntax trees back.

    They have half a million nodes, which all stay: garbage collections meanwhile would take as long as parsing.
    """
    gc.disable()
    yield
    load_package.cache_clear()
    gc.enable()
