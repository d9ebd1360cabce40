"""A drafter's name stands in its own file and in the table of roles alone; the drafter announces everything else."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.architecture.layers import imported_names
from tests.architecture.source import PACKAGE, Function, Module

# Words of other programs' formats that are spelt like a drafter's name, by module.
FOREIGN_WORDS = {
    ("text.sandbox", "random"),  # a filter of jinja2
    ("text.tokenizer_bounds", "suffix"),  # a key of tokenizer.json
    ("text.tokenizer", "suffix"),  # the same
    ("serving.openai.settings", "suffix"),  # a field of OpenAI's requests
    ("params", "prediction"),  # OpenAI's word for a guess of the output
}


ROLES = "drafting.methods"  # the table of the methods' roles, the only other file that may name drafters, as strings


def drafter_names(modules: Iterable[Module]) -> set[str]:
    """Return the names of all drafters: the public modules in `drafting` and its rooms that define `build`."""
    inside = (module for module in modules if module.name.startswith("drafting.") and _defines_build(module))
    return {name for module in inside if not (name := _last(module.name)).startswith("_")}


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _defines_build(module: Module) -> bool:
    return any(isinstance(node, Function) and node.name == "build" for node in module.tree.body)


def leaks(module: Module, names: set[str]) -> list[str]:
    """Say where a module names a drafter that is not itself, as a string or as an import."""
    own = _last(module.name) if module.name.startswith("drafting.") else ""
    others = names - {own}
    return [*(_strings(module, others) if module.name != ROLES else []), *_imports(module, others)]


def _strings(module: Module, names: set[str]) -> list[str]:
    return [
        f"{module.at(node)}: the string {node.value!r} names a drafter"
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
        if (module.name, node.value) not in FOREIGN_WORDS
    ]


def _imports(module: Module, names: set[str]) -> list[str]:
    return [
        f"{module.at(node)}: imports the drafter {imported}"
        for node, imported in imported_names(module)
        if names.intersection(imported.removeprefix(f"{PACKAGE}.drafting.").split(".")[:2])
        and imported.startswith(f"{PACKAGE}.drafting.")
    ]
