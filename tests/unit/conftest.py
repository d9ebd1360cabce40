"""The small checkpoints, and commands without the tests' own settings."""

from __future__ import annotations

import pytest

from tests.models import checkpoints

__all__ = ["checkpoints"]


@pytest.fixture(autouse=True)
def usual_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the variable that turns the search for drafts off in processes of tests."""
    monkeypatch.delenv("SPECULANT_FIND_DRAFTS", raising=False)
