"""Which part of the package may import which (docs/architecture.md draws it for readers)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from tests.architecture.rooms import home
from tests.architecture.source import PACKAGE, Module

EVERYWHERE = frozenset(
    {
        *("types", "tree", "beams", "constraints", "counts", "params", "config", "errors", "files", "kept_files"),
        *("gguf_file", "metrics", "checks"),
    }
)
MODELS_AND_BELOW = frozenset({"models", "cache", "sampling", "kernels"})
ENGINE_AND_BELOW = MODELS_AND_BELOW | {
    *("engine", "drafting", "verification", "scheduling", "lengths", "text", "structured", "plugins")
}

# A name allows a module and everything in it; every part may also import itself, and the package's version.
ALLOWED: dict[str, frozenset[str]] = {
    "": ENGINE_AND_BELOW | EVERYWHERE,
    "errors": frozenset(),
    "checks": frozenset({"errors"}),
    "params": frozenset({"checks", "errors", "structured.spec"}),
    "kept_files": frozenset(),
    "files": frozenset({"errors", "kept_files"}),
    "gguf_file": frozenset({"errors", "files"}),
    "metrics": frozenset({"errors"}),
    "tree": frozenset(),
    "beams": frozenset({"tree"}),
    "constraints": frozenset({"errors", "tree"}),
    "counts": frozenset({"tree"}),
    "types": frozenset({"errors", "params", "metrics", "beams", "tree", "constraints", "counts"}),
    "config": frozenset({"checks", "errors", "files", "params", "types"}),
    "plugins": frozenset({"errors", "params", "types", "config"}),
    "text": frozenset({"errors", "files", "gguf_file", "params", "types", "config"}),
    "structured": frozenset({"errors", "files", "constraints", "text"}),
    "kernels": EVERYWHERE,
    "cache": EVERYWHERE | {"kernels"},
    "sampling": EVERYWHERE | {"kernels"},
    "models": EVERYWHERE | {"cache", "sampling", "kernels", "plugins"},
    "drafting": EVERYWHERE | MODELS_AND_BELOW | {"text", "plugins"},
    "verification": EVERYWHERE | MODELS_AND_BELOW | {"plugins"},
    "scheduling": EVERYWHERE | {"cache.base", "cache.paged", "cache.prepared"},
    "lengths": EVERYWHERE | MODELS_AND_BELOW | {"scheduling", "drafting.base", "plugins"},
    "engine": EVERYWHERE | ENGINE_AND_BELOW,
    "serving": EVERYWHERE | ENGINE_AND_BELOW,
    "scale": EVERYWHERE | {"engine.async_engine", "serving"},
    "ray": frozenset({"scale"}),
    "cli": EVERYWHERE | ENGINE_AND_BELOW - {"plugins"} | {"serving", "scale"},
    "lab": frozenset(),
    "lab.theory": frozenset({"metrics"}),
    "lab.fleet": frozenset({"errors", "lab.theory"}),
    "lab.checkpoints": frozenset({"models"}),
    "lab.quantize": EVERYWHERE | MODELS_AND_BELOW | {"text", "lab.checkpoints"},
    "lab.training": EVERYWHERE | ENGINE_AND_BELOW | {"lab.checkpoints"},
    "lab.exactness": EVERYWHERE | ENGINE_AND_BELOW,
    "lab.inflation": EVERYWHERE | ENGINE_AND_BELOW | {"lab.checkpoints"},
    "lab.cli": EVERYWHERE | ENGINE_AND_BELOW - {"plugins"} | {"cli", "lab"},
    "lab.bench": EVERYWHERE | ENGINE_AND_BELOW | {"lab.theory", "lab.training", "lab.inflation"},
}
# What is written for the native library. Others hold a `Backend` or a `Sampler`.
NATIVE = frozenset(
    {
        *("kernels.native", "kernels.packing", "models.native", "models.backends.native"),
        *("models.weights.reader", "models.weights.cache"),
    }
)
CHOOSERS = frozenset({"kernels.suffix_index"})  # takes what is native where it was built, else the reference
INSPECTORS = frozenset({"cli.doctor"})  # `speculant doctor` looks at the library itself
OUTSIDE_OF_THEORY = frozenset({"numpy", "lazy_loader"})


def imported_names(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield every absolute dotted name that a module imports, wherever the import stands.

    `from a.b import c` gives "a.b.c": c may be a module.
    """
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *filter(None, module.name.split("."))]
    above = here[: len(here) - node.level + module.is_package]
    return ".".join([*above, *filter(None, [node.module])])


def layer_violations(module: Module) -> list[str]:
    """Say which imports of a module the table does not allow."""
    if module.part not in ALLOWED:
        return [f"{module.at(module.tree)}: {module.part!r} is missing in the import table"]
    return [
        f"{module.at(node)}: {module.part or PACKAGE} may not import {name}"
        for node, name in imported_names(module)
        if not (_allowed_inside(module, name) if _is_ours(name) else _allowed_outside(module, name))
    ]


def native_violations(module: Module) -> list[str]:
    """Find where a module that is not native imports native code."""
    if module.name in CHOOSERS | INSPECTORS or _is_native(module.name):
        return []
    names = [(node, home(name.removeprefix(PACKAGE + "."))) for node, name in imported_names(module) if _is_ours(name)]
    return [f"{module.at(node)}: {module.name} may not import {name}" for node, name in names if _is_native(name)]


def _is_native(name: str) -> bool:
    return any(name == part or name.startswith(part + ".") for part in NATIVE)


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(PACKAGE + ".")


def _allowed_inside(module: Module, name: str) -> bool:
    inner = home(name.removeprefix(PACKAGE).removeprefix("."))
    allowed = {"__version__", *ALLOWED[module.part], *filter(None, [module.part])}
    return any(inner == part or inner.startswith(part + ".") for part in allowed)


def _allowed_outside(module: Module, name: str) -> bool:
    top = name.split(".")[0]
    return module.part != "lab.theory" or top in OUTSIDE_OF_THEORY or _is_standard(top)


def _is_standard(top: str) -> bool:
    return top in sys.stdlib_module_names
