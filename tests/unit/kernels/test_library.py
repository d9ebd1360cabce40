"""A native library of another version, or a file that is none, is refused with the fix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from numpy._core import _multiarray_umath

from speculant.errors import ConfigError
from speculant.kernels import load_library, native, open_kernels


class Library:
    """A library whose only function is `sp_version`."""

    def __init__(self, version: int) -> None:
        self.sp_version: Callable[[], int] = lambda: version


@pytest.fixture(autouse=True)
def _loaded_anew() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("SPECULANT_LIBRARY", str(path))


def refused(*words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_library()
    assert "install the package again" in caught.value.fix
    assert all(word in caught.value.problem for word in words), caught.value.problem


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is refused by its version, before functions are looked for that it does not have."""
    (tmp_path / "old.so").touch()
    use(monkeypatch, tmp_path / "old.so")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library(native.VERSION - 1))
    refused("old.so", f"is version {native.VERSION - 1}", f"needs {native.VERSION}")


def test_a_library_that_lacks_a_function_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "part.so").touch()
    use(monkeypatch, tmp_path / "part.so")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library(native.VERSION))
    refused("part.so", "sp_name")


def test_a_library_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Path(_multiarray_umath.__file__))
    refused("sp_version")


def test_a_file_that_is_no_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    use(monkeypatch, tmp_path / "text.so")
    refused("text.so can't be loaded")


def test_a_library_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path / "none.so")
    refused("SPECULANT_LIBRARY", "none.so")


def with_sets(monkeypatch: pytest.MonkeyPatch, **sets: tuple[bool, bool]) -> None:
    """Replace the library by one of sets that are usable or not, and measured or not."""
    names, facts = [*(name.encode() for name in sets), None], [*sets.values()]
    library = SimpleNamespace(
        sp_name=lambda index: names[index],
        sp_usable=lambda index: facts[index][0],
        sp_by_default=lambda index: facts[index][1],
    )
    monkeypatch.setattr(native, "load_library", lambda: library)
    monkeypatch.delenv("SPECULANT_ISA", raising=False)


def test_a_library_for_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_sets(monkeypatch, other=(False, True))
    with pytest.raises(ConfigError, match="built for other") as caught:
        open_kernels()
    assert "install the package again" in caught.value.fix


def opened() -> str:
    found = open_kernels()
    assert found is not None
    return found.isa


def test_a_set_that_was_never_measured_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the default only where there is no other."""
    with_sets(monkeypatch, new=(True, False), lacking=(False, True), old=(True, True), oldest=(True, True))
    assert opened() == "old"
    monkeypatch.setenv("SPECULANT_ISA", "new")
    assert opened() == "new"
    with_sets(monkeypatch, new=(True, False), old=(False, True))
    assert opened() == "new"


@pytest.mark.parametrize(("named", "why"), [("lacking", "this machine can't run"), ("none", "built without")])
def test_a_set_that_is_not_usable_is_refused(monkeypatch: pytest.MonkeyPatch, named: str, why: str) -> None:
    with_sets(monkeypatch, lacking=(False, True), old=(True, True))
    monkeypatch.setenv("SPECULANT_ISA", named)
    with pytest.raises(ConfigError, match=why) as caught:
        open_kernels()
    assert repr(named) in caught.value.problem
    assert "old" in caught.value.fix


def test_the_library_of_this_version_is_loaded() -> None:
    library = load_library()
    assert library is None or library.sp_version() == native.VERSION
