"""How many examples hypothesis draws for tests that set their own number."""

from __future__ import annotations

from hypothesis import settings

FULL = 100  # what the profile "full" draws where a test says nothing


def examples(full: int, least: int = 8) -> int:
    """Return `full` in `make test-all`; otherwise, in proportion to the profile, fewer but no fewer than `least`."""
    return min(full, max(least, full * settings.default.max_examples // FULL))
