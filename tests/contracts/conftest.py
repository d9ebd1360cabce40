"""The small checkpoints, and the drafter that docs/adding-a-drafter.md describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speculant import drafting
from tests.models import checkpoints

__all__ = ["checkpoints", "documented_drafter"]

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"


@pytest.fixture
def documented_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save the page's code where the package looks for drafters; return the file."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (name,) = re.findall(r"Saved as `(\w+\.py)`", PAGE.read_text(encoding="utf-8"))
    (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.setattr(drafting, "__path__", [*drafting.__path__, str(tmp_path)])
    return tmp_path / name
