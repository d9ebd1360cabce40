"""The table of families in the docs is that of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("support_table", ROOT / "tools" / "support_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text(encoding="utf-8")
    assert "| `llama` |" in page
    assert tool.updated(page) == page, "run: python tools/support_table.py"
