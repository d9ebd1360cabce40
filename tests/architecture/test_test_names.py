"""Test names are `test_<unit>_<behaviour>`, under 60 characters."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.source import Module, functions, load_package

TESTS = Path(__file__).parents[1]
LONGEST_NAME = 60  # characters; exclusive
LONG = re.compile(rf"\bdef\s+test_\w{{{LONGEST_NAME - len('test_')}}}")


def long_test_names(module: Module) -> list[str]:
    """Find test functions whose names are too long."""
    if not LONG.search(module.text):  # parsing all tests takes seconds
        return []
    return [
        f"{module.at(function)}: {function.name} has {len(function.name)} characters"
        for function in functions(module)
        if function.name.startswith("test_") and len(function.name) >= LONGEST_NAME
    ]


def test_test_names_are_short() -> None:
    modules = load_package(TESTS)
    assert any(function.name.startswith("test_") for module in modules for function in functions(module))
    assert [message for module in modules for message in long_test_names(module)] == []


def test_a_long_test_name_is_found() -> None:
    name = "test_".ljust(LONGEST_NAME, "x")
    assert len(long_test_names(Module("m", f"class A:\n    async def {name}(self): ...\n"))) == 1
    assert long_test_names(Module("m", f"def {name[:-1]}(): ...\ndef {name[5:]}_and_no_test(): ...\n")) == []
