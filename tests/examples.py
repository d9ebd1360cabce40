"""How much tests do in `make test`, and in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

FULL = 100  # what the profile "full" draws where a test says nothing


def examples(full: int, least: int = 8) -> int:
    """Return `full` in `make test-all`; otherwise, in proportion to the profile, fewer but no fewer than `least`."""
    return min(full, max(least, full * settings.default.max_examples // FULL))


def sizes(quick: int, full: int) -> list[Any]:
    """Return the sizes of a test, to parametrise it with: a quick one, and the full one, which is slow."""
    return [quick, pytest.param(full, marks=pytest.mark.slow)]
