"""The small checkpoints, and the plug-ins that the pages in docs/ describe."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from speculant import drafting, lengths
from tests.models import checkpoints

__all__ = ["checkpoints", "documented_drafter", "documented_length"]

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def documented_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save the page's code where the package looks for drafters; return the file."""
    return install("adding-a-drafter.md", drafting, tmp_path, monkeypatch)


@pytest.fixture
def documented_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save the page's code where the package looks for draft-length policies; return the file."""
    return install("adding-a-draft-length.md", lengths, tmp_path, monkeypatch)


def install(page: str, package: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a page's code under the name that it says, in a folder where a package looks for plug-ins."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (name,) = re.findall(r"Saved as `(\w+\.py)`", text)
    (folder / name).write_text(code, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    return folder / name
