"""No hidden state, no swallowed errors, no undocumented surface, no drawers for odds and ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.architecture.hygiene import (
    bare_excepts,
    doubled_classes,
    forbidden_names,
    missing_docstrings,
    module_state,
)
from tests.architecture.source import Module, load_package

RULES: list[Callable[[Module], list[str]]] = [bare_excepts, forbidden_names, missing_docstrings, module_state]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_obeys(rule: Callable[[Module], list[str]]) -> None:
    assert [message for module in load_package() for message in rule(module)] == []


def test_bare_except_is_found() -> None:
    text = "try:\n    pass\nexcept:\n    pass\n"
    assert bare_excepts(Module("m", text)) == ["m:3: bare except"]
    assert bare_excepts(Module("m", text.replace("except", "except ValueError"))) == []


@pytest.mark.parametrize("name", ["cache.utils", "helpers", "engine.string_utils", "models.new_attention"])
def test_empty_names_are_found(name: str) -> None:
    assert len(forbidden_names(Module(name, ""))) == 1


def test_a_class_name_stands_in_one_module() -> None:
    assert doubled_classes(load_package()) == []


def test_doubled_class_names_are_found() -> None:
    modules = [Module("a", "class A: ...\nclass B: ...\n"), Module("b", "class A: ...\n")]
    assert doubled_classes(modules) == ["A: a:1, b:1"]


def test_missing_docstrings_are_found() -> None:
    text = "class A:\n    def f(self): ...\n    def _g(self): ...\ndef h():\n    def inner(): ...\nclass _B: ...\n"
    assert [message.split()[1] for message in missing_docstrings(Module("m", text))] == ["module", "A", "f", "h"]


def test_documented_and_overriding_methods_pass() -> None:
    text = '"""M."""\nclass A:\n    """A."""\n    @override\n    def f(self): ...\n    def __len__(self): ...\n'
    assert missing_docstrings(Module("m", text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}\n",
        "cache: dict[str, int] = dict()\n",
        "names = [n for n in 'abc']\n",
        "context = ContextVar('context')\n",
        "STATE = threading.local()\n",
        "count = 0\ndef f():\n    global count\n",
        "SEEN = set()\ndef f(x):\n    SEEN.add(x)\n",
        "TABLE = {}\ndef f(k):\n    TABLE[k] = 1\n",
        "TABLE = {}\ndef f(k):\n    del TABLE[k]\n",
        "TABLE = {}\ndef f(k):\n    TABLE[k] += 1\n",
        "SETTINGS = Settings()\ndef f():\n    SETTINGS.size = 1\n",
    ],
)
def test_module_state_is_found(text: str) -> None:
    assert len(module_state(Module("m", text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "SIZES = {'a': 1}\ndef f(k):\n    return SIZES[k]\n",
        "__all__ = ['f']\n",
        "logger = logging.getLogger(__name__)\n",
        "NAMES = frozenset({'a'})\n",
        "rows = 3\ndef f():\n    rows = []\n    rows.append(1)\n",
        "rows = 3\ndef f(rows):\n    rows.append(1)\n",
    ],
)
def test_constants_and_locals_pass(text: str) -> None:
    assert module_state(Module("m", text)) == []
