"""Rooms: folders of the package with one subject, a public face, and a budget of lines and files.

The face is the `__init__.pyi` of a room: the names that tests and other rooms may import, each with its file inside.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import PACKAGE, SOURCE_ROOT, Function

ROOT = SOURCE_ROOT.parents[1]
USERS = ("src", "tests", "benchmarks", "examples", "tools")


@functools.cache
def rooms() -> dict[str, dict[str, str]]:
    """Return each room's face: the module that defines each name. All are dotted, without the package's name."""
    stubs = sorted(SOURCE_ROOT.rglob("__init__.pyi"))
    return {_dotted(stub.parent): dict(_face(stub)) for stub in stubs}


def _dotted(folder: Path) -> str:
    return ".".join(folder.relative_to(SOURCE_ROOT).parts)


def _face(stub: Path) -> Iterator[tuple[str, str]]:
    room = _dotted(stub.parent)
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        assert isinstance(node, ast.ImportFrom), stub
        yield from ((alias.name, f"{room}.{node.module}") for alias in node.names)


def room_of(module: str) -> str | None:
    """Return the room that a module of the package is in; None = a module beside the rooms."""
    return next((room for room in rooms() if module == room or module.startswith(room + ".")), None)


def defined(module: str) -> set[str]:
    """Return the names that a module defines at its top level."""
    path = SOURCE_ROOT / module.replace(".", "/")
    path = path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")
    body = ast.parse(path.read_text(encoding="utf-8")).body
    stored = (
        target.id
        for node in body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    )
    return {node.name for node in body if isinstance(node, ast.ClassDef | Function)} | {*stored}


def home(name: str) -> str:
    """Return the dotted name of what an imported name stands for: a face's names stand for those of its files."""
    room, _, own = name.rpartition(".")
    inner = rooms().get(room, {}).get(own)
    return name if inner is None else f"{inner}.{own}"


def inner_imports(path: Path) -> Iterator[str]:
    """Say where a file imports from a file inside a room that it does not belong to."""
    relative = path.relative_to(ROOT)
    here = (
        room_of(".".join(path.relative_to(SOURCE_ROOT).with_suffix("").parts)) if relative.parts[0] == "src" else None
    )
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            base = node.module or ""
            files = [f"{base}.{alias.name}" for alias in node.names if _is_file(f"{base}.{alias.name}")]
            names = files or [base]
        for name in names:
            inner = name.removeprefix(PACKAGE + ".")
            room = room_of(inner) if inner != name else None
            if room not in (None, here) and inner != room:
                yield f"{relative}:{getattr(node, 'lineno', 1)}: {name} is inside {room}"


def _is_file(name: str) -> bool:
    inner = name.removeprefix(PACKAGE + ".")
    path = SOURCE_ROOT / inner.replace(".", "/")
    own = inner.rpartition(".")
    return (
        own[2] not in rooms().get(own[0], {})
        and inner not in rooms()
        and ((path / "__init__.py").exists() or path.with_suffix(".py").exists())
    )


def size(room: str) -> tuple[int, int]:
    """Return a room's lines and files, of its code and its face."""
    files = [*(SOURCE_ROOT / room.replace(".", "/")).rglob("*.py*")]
    sources = [file for file in files if file.suffix in (".py", ".pyi")]
    return sum(file.read_text(encoding="utf-8").count("\n") for file in sources), len(sources)
