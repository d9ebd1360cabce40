"""The package's source as syntax trees: what every architecture check reads."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "speculant"
SOURCE_ROOT = Path(__file__).parents[2] / "src" / PACKAGE

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Module:
    """One source file. `name` is dotted and without the package: "models.base", "" for the package itself."""

    name: str
    text: str
    is_package: bool = False

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree: many checks walk it."""
        return tuple(ast.walk(self.tree))

    @property
    def part(self) -> str:
        """The part of the package that the import table speaks of: "models", "types", "lab.bench", ..."""
        first, *inner = self.name.split(".")
        return f"{first}.{inner[0]}" if first == "lab" and inner else first

    @property
    def num_lines(self) -> int:
        """Lines in the file."""
        return self.text.count("\n")

    def at(self, node: ast.AST) -> str:
        """Say where a node stands, for a message."""
        return f"{self.name or PACKAGE}:{getattr(node, 'lineno', 1)}"


@functools.cache
def load_package(root: Path = SOURCE_ROOT) -> list[Module]:
    """Read every Python file under the package, once."""
    return [_load(path, root) for path in sorted(root.rglob("*.py"))]


def _load(path: Path, root: Path) -> Module:
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package)


def functions(module: Module) -> Iterator[Function]:
    """Yield every function and method, nested ones too."""
    return (node for node in module.nodes if isinstance(node, Function))


def num_lines(function: Function) -> int:
    """Lines from `def` to the end; decorators are not counted."""
    return (function.end_lineno or function.lineno) - function.lineno + 1
