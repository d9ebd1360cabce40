"""Checks that no module hides state, swallows errors, lacks docstrings or collects odds and ends."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.architecture.source import Documented, Function, Module, functions

FORBIDDEN_WORDS = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "new", "old"})
MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "ContextVar", "local"}
)
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATORS = frozenset(
    {"append", "add", "update", "extend", "insert", "remove", "pop", "clear", "discard", "setdefault", "popitem"}
)


def bare_excepts(module: Module) -> list[str]:
    """Find handlers that catch everything without naming it."""
    return [
        f"{module.at(node)}: bare except"
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def forbidden_names(module: Module) -> list[str]:
    """Find modules whose names name nothing."""
    words = {word for part in module.name.split(".") for word in part.split("_")}
    return [f"{module.name}: {word!r} says nothing about a module" for word in sorted(words & FORBIDDEN_WORDS)]


def doubled_classes(modules: Iterable[Module]) -> list[str]:
    """Find class names that stand in several modules."""
    homes: dict[str, list[str]] = {}
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module.at(node))
    return [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]


def missing_docstrings(module: Module) -> list[str]:
    """Find public modules, classes, functions and methods without a docstring."""
    return [
        f"{module.at(node)}: {getattr(node, 'name', 'module')} has no docstring"
        for node in _public(module.tree)
        if ast.get_docstring(node) is None
    ]


def _public(node: Documented) -> Iterator[Documented]:
    yield node
    for child in ast.iter_child_nodes(node) if not isinstance(node, Function) else ():
        if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_") and not _is_exempt(child):
            yield from _public(child)


def _is_exempt(node: ast.ClassDef | Function) -> bool:
    """An override has its base's docstring; an overload its implementation's."""
    names = {getattr(decorator, "id", getattr(decorator, "attr", "")) for decorator in node.decorator_list}
    return bool(names & {"override", "overload", "setter"})


def module_state(module: Module) -> list[str]:
    """Find state that lives as long as the process: mutable globals, and constants that functions change."""
    constants = set(_module_names(module.tree))
    changes = any(isinstance(node, ast.Global) or constants.intersection(_changed_names(node)) for node in module.nodes)
    return [
        *(f"{module.at(node)}: mutable module-level state {name!r}" for node, name in _mutable_globals(module.tree)),
        *(
            f"{module.at(node)}: changes module-level {name!r}"
            for function in (functions(module) if changes else ())  # most modules have no such names at all
            for node, name in _changes(function, constants)
        ),
    ]


def _module_names(tree: ast.Module) -> Iterator[str]:
    for _, name, _ in _assignments(tree):
        yield name


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.stmt, str, ast.expr | None]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name):
                yield node, target.id, node.value


def _mutable_globals(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node, name, value in _assignments(tree):
        is_constant = name.strip("_").isupper() or name == "__all__"
        if _is_context(value) or (_is_mutable(value) and not is_constant):
            yield node, name


def _called(value: ast.expr | None) -> str:
    if not isinstance(value, ast.Call):
        return ""
    return str(getattr(value.func, "id", getattr(value.func, "attr", "")))


def _is_mutable(value: ast.expr | None) -> bool:
    return isinstance(value, MUTABLE_DISPLAYS) or _called(value) in MUTABLE_CALLS


def _is_context(value: ast.expr | None) -> bool:
    return _called(value) in {"ContextVar", "local"}


def _changes(function: Function, constants: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Yield the changes that a function makes to module-level names; a local of the same name hides the global."""
    local = _local_names(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield node, node.names[0]
        else:
            yield from ((node, name) for name in _changed_names(node) if name in constants - local)


def _local_names(function: Function) -> set[str]:
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return arguments | stored


def _changed_names(node: ast.AST) -> Iterable[str]:
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return _root_name(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return _root_name(node.func.value)
    return ()


def _root_name(node: ast.expr) -> Iterable[str]:
    return (node.id,) if isinstance(node, ast.Name) else ()
