"""Finds front ends that can reach an `Engine` outside a turn: that of a thread, or the thread that owns the engine.

In a front end an engine is a local name: `with turn as engine`, or an argument. Kept in an attribute, or read off its
runtime, it could be used at any time. Two places may: `EngineTurn`, which lends it, and an `__init__`, which hands it
to a turn or to a thread before anything runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.source import Function, Module

FRONT_ENDS = ("llm", "async_engine", "frontend", "generation", "readings")
SURFACES = ("serving", "scale")
LENDER = "EngineTurn"
FOR_ONE_THREAD = ("LLM", "engine")  # the property that measurements and tests use


def engines_out_of_turn(module: Module) -> list[str]:
    """Find the places in which a front end keeps an engine, or takes it from its runtime or an `LLM`."""
    room, _, name = module.name.partition(".")
    if room not in SURFACES and (room, name) not in {("engine", each) for each in FRONT_ENDS}:
        return []
    return [
        f"{module.at(node)}: {owner}.{function} has the engine out of turn"
        for owner, function, node in _scoped(module.tree)
        if owner != LENDER and (owner, function) != FOR_ONE_THREAD
        if (room == "engine" and _keeps(node)) or (function != "__init__" and _reads(node))
    ]


def _scoped(node: ast.AST, owner: str = "", function: str = "") -> Iterator[tuple[str, str, ast.AST]]:
    """Yield every node, with the class and the outermost function that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield owner, function, child
        inner = child.name if isinstance(child, ast.ClassDef) else owner
        yield from _scoped(child, inner, (function or child.name) if isinstance(child, Function) else function)


def _reads(node: ast.AST) -> bool:
    """Whether a node is `runtime.engine`, `llm.engine`, or the like."""
    return isinstance(node, ast.Attribute) and node.attr == "engine" and _name(node.value) in ("runtime", "llm", "self")


def _keeps(node: ast.AST) -> bool:
    """Whether a node stores an engine in an attribute."""
    if not isinstance(node, ast.Assign) or not any(isinstance(each, ast.Attribute) for each in _flat(node.targets)):
        return False
    return any(_reads(each) or (isinstance(each, ast.Name) and each.id == "engine") for each in _flat([node.value]))


def _flat(nodes: list[ast.expr]) -> Iterator[ast.expr]:
    for node in nodes:
        yield from _flat(node.elts) if isinstance(node, ast.Tuple) else [node]


def _name(node: ast.expr) -> str:
    return str(getattr(node, "attr", getattr(node, "id", ""))).strip("_")
