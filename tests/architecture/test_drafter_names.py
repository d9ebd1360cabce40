"""No drafter's name outside its own file and the table of roles."""

from __future__ import annotations

import pytest

from tests.architecture.drafters import drafter_names, leaks
from tests.architecture.source import Module, load_package

BUILD = "def build(config, target):\n    return None\n"


def test_no_module_names_a_drafter() -> None:
    modules = load_package()
    names = drafter_names(modules)
    assert [leak for module in modules for leak in leaks(module, names)] == []


def test_the_table_of_roles_names_drafters_and_imports_none() -> None:
    assert leaks(Module("drafting.methods", "DEFAULT = 'lookahead'\n"), {"lookahead"}) == []
    assert leaks(Module("drafting.methods", "from speculant.drafting.room import lookahead\n"), {"lookahead"})
    assert leaks(Module("drafting.combine.methods", "DEFAULT = 'lookahead'\n"), {"lookahead"})


def test_drafters_are_found_in_the_package() -> None:
    modules = load_package()
    if not any(module.part == "drafting" for module in modules):
        pytest.fail("the package has no drafting/")
    assert drafter_names(modules)


def test_a_drafter_is_a_public_module_that_defines_build() -> None:
    modules = [
        Module("drafting.lookahead", BUILD),
        Module("drafting.room.inner", BUILD),
        Module("drafting.base", "class Drafter: ...\n"),
        Module("drafting._table", BUILD),
        Module("models.families.llama", BUILD),
    ]
    assert drafter_names(modules) == {"lookahead", "inner"}


@pytest.mark.parametrize(
    "text",
    [
        "method = 'lookahead'\n",
        "if config.method == 'lookahead':\n    pass\n",
        "from speculant.drafting import lookahead\n",
        "from speculant.drafting.lookahead import Lookahead\n",
        "import speculant.drafting.lookahead\n",
        "from speculant.drafting.room import lookahead\n",
        "from speculant.drafting.room.lookahead import Lookahead\n",
    ],
)
def test_a_leak_is_found(text: str) -> None:
    assert len(leaks(Module("engine.step", text), {"lookahead"})) == 1


@pytest.mark.parametrize(
    "module",
    [
        Module("engine.step", "def load(lookahead: str) -> str:\n    return lookahead\n"),
        Module("cli.generate", "flag = '--lookahead'\n"),
        Module("drafting.lookahead", "name = 'lookahead'\n"),
        Module("drafting.room.lookahead", "name = 'lookahead'\n"),
    ],
)
def test_identifiers_and_the_own_file_are_free(module: Module) -> None:
    assert leaks(module, {"lookahead"}) == []
