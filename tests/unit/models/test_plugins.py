"""A plugin is a file with the right attribute, or an entry point of another package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from speculant import plugins
from speculant.errors import ConfigError


def test_families_are_files_and_shared_modules_are_not() -> None:
    names = plugins.names("speculant.models")
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(names)
    assert not {"base", "config", "decoder", "weights"} & set(names)
    assert names == sorted(names)


def test_load_returns_the_module() -> None:
    assert plugins.load("speculant.models", "llama").read_config.__module__ == "speculant.models.families.llama"


@pytest.mark.parametrize("name", ["lama", "decoder", "..errors", "os", ""])
def test_an_unknown_name_gets_advice(name: str) -> None:
    with pytest.raises(ConfigError, match="llama"):
        plugins.load("speculant.models", name)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kind of plugin of its own, with one plugin that can't be imported."""
    folder = tmp_path / "kinds_for_tests"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "works.py").write_text("def build(): return 'built'\n")
    (folder / "reexports.py").write_text("from kinds_for_tests.works import build\n")
    (folder / "needs_more.py").write_text("import not_installed_anywhere\nbuild = not_installed_anywhere.build\n")
    (folder / "shared.py").write_text("class Base:\n    def build(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(plugins.ATTRIBUTES, "kinds_for_tests", "build")
    yield "kinds_for_tests"
    for module in [name for name in sys.modules if name.startswith("kinds_for_tests")]:
        del sys.modules[module]


def test_listing_imports_nothing(package: str) -> None:
    assert plugins.names(package) == ["needs_more", "reexports", "works"]
    assert f"{package}.works" not in sys.modules
    assert plugins.load(package, "works").build() == "built"


def test_plugins_can_be_found_by_another_attribute(package: str) -> None:
    assert plugins.names(package, "Base") == ["shared"]


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def add(value: str) -> None:
        point = EntryPoint("theirs", value, "speculant.models")
        monkeypatch.setattr(plugins, "_entry_points", lambda kind: {point.name: point} if kind == point.group else {})

    return add


def test_another_package_adds_a_plugin(entry_point: Callable[[str], None]) -> None:
    entry_point("speculant.models.families.qwen3")
    assert "theirs" in plugins.names("speculant.models")
    assert plugins.load("speculant.models", "theirs").__name__ == "speculant.models.families.qwen3"


@pytest.mark.parametrize(("value", "reason"), [("no.such_module", "imported"), ("speculant.errors", "read_config")])
def test_a_broken_entry_point_is_named(entry_point: Callable[[str], None], value: str, reason: str) -> None:
    entry_point(value)
    with pytest.raises(ConfigError, match=reason) as caught:
        plugins.load("speculant.models", "theirs")
    assert "theirs" in str(caught.value)
