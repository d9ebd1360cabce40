"""docs/drafters.md has every method, and each of its options with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from speculant import plugins

PAGE = (Path(__file__).parents[3] / "docs/drafters.md").read_text(encoding="utf-8")
METHODS = plugins.names("speculant.drafting")


def about(method: str) -> str:
    """Return the method's section; for one without a section, its rows of tables and the lines of lists on it."""
    sections = re.findall(rf"^### {method}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    return "\n".join([*sections, *re.findall(rf"^(?:\||-) `{method}`.*$", PAGE, re.MULTILINE)])


def options(method: str) -> dict[str, Any]:
    """Return a method's options with their defaults."""
    kinds = [
        kind for name, kind in vars(plugins.load("speculant.drafting", method)).items() if name.endswith("Options")
    ]
    return {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("method", METHODS)
def test_the_page_has_a_method_and_its_options(method: str) -> None:
    assert f"`{method}`" in PAGE
    shown = about(method) or next(block for block in PAGE.split("\n\n") if f"`{method}`" in block and "#" not in block)
    for name, default in options(method).items():
        rows = [line for line in shown.splitlines() if f"`{name}`" in line]
        assert rows, f"{method} has the option {name}"
        if isinstance(default, int | float | str) and rows[0].startswith("| `" + name):
            assert str(default) in rows[0]


def test_the_page_names_no_other_method() -> None:
    assert set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE)) - {"Errors"} <= set(METHODS)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"random", "synthetic"}))
def test_the_page_says_what_a_method_costs(method: str) -> None:
    costs = PAGE[PAGE.index("## Memory and cost") :]
    assert re.search(rf"^\|[^|]*`{method}`", costs, re.MULTILINE)
