"""Plugins found by name: modules of this package, and entry points of other packages.

A package such as `speculant.drafting` is a kind of plugin. A module in it or in a subpackage is a plugin if it defines
the kind's attribute at the top level; the module's name is the plugin's. There is no registration, and a plugin is
imported on first use. Other packages add plugins by an entry point group with the kind's name:

    [project.entry-points."speculant.models"]
    my_family = "my_package.my_family"
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import InspectLoader
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec
from typing import Any

from speculant.errors import ConfigError, suggest

ATTRIBUTES = {
    "speculant.drafting": "build",
    "speculant.models": "read_config",
    "speculant.lengths": "build",
    "speculant.serving.tools": "Parser",
    "speculant.models.backends": "open_backend",
    "speculant.models.weights.schemes": "read_scheme",
    "speculant.verification": "build",
}


def names(package: str, attribute: str | None = None) -> list[str]:
    """Return the sorted names of a kind's plugins, without importing any of them.

    attribute: a module that defines it is a plugin; None = the kind's own attribute.
    """
    wanted = attribute or ATTRIBUTES[package]
    return sorted({*_built_in(package, wanted), *_entry_points(package)})


def load(package: str, name: str) -> Any:
    """Import a plugin and return its module (or whatever object an entry point names).

    Raises ConfigError for an unknown name, or if the plugin does not define the kind's attribute.
    """
    attribute = ATTRIBUTES[package]
    if (module := _built_in(package, attribute).get(name)) is not None:
        return importlib.import_module(module)
    if name not in (others := _entry_points(package)):
        kind = package.rpartition(".")[2]
        raise ConfigError(f"there is no {kind} plugin called {name!r}", suggest(name, names(package)))
    return _load_entry_point(others[name], attribute)


Folders = tuple[tuple[str, int], ...]  # paths, each with the time of its last change


def _folders(paths: Iterable[str]) -> Folders:
    """Return a cache key for lookups in these folders, which an engine's start repeats many times."""
    return tuple((path, os.stat(path).st_mtime_ns if os.path.isdir(path) else 0) for path in paths)


def _built_in(package: str, attribute: str) -> Mapping[str, str]:
    """Return the modules of a package and its subpackages that define an attribute: full names by last names."""
    found: dict[str, str] = {}
    for each in (package, *_subpackages(package, _folders(importlib.import_module(package).__path__))):
        found |= _defining(each, attribute, _folders(importlib.import_module(each).__path__))
    return found


@functools.lru_cache(maxsize=64)
def _subpackages(package: str, folders: Folders) -> tuple[str, ...]:
    modules = pkgutil.iter_modules([path for path, _ in folders])
    return tuple(f"{package}.{module.name}" for module in modules if module.ispkg)


@functools.lru_cache(maxsize=64)
def _defining(package: str, attribute: str, folders: Folders) -> Mapping[str, str]:
    """Return the modules of a package, which is in these folders, that define an attribute."""
    names = [f"{package}.{module.name}" for module in pkgutil.iter_modules([path for path, _ in folders])]
    return {name.rpartition(".")[2]: name for name in names if _defines(name, attribute)}


def _defines(module: str, attribute: str) -> bool:
    """Whether a module's source defines an attribute. So a plugin is listed even if its imports are missing."""
    spec = find_spec(module)
    loader = spec.loader if spec else None
    source = loader.get_source(module) if isinstance(loader, InspectLoader) else None
    if source is None:
        return hasattr(importlib.import_module(module), attribute)
    usual = re.search(rf"^(?:def|class) {re.escape(attribute)}\b", source, re.MULTILINE)  # parsing takes longer
    return usual is not None or attribute in _bound_in(source)


@functools.lru_cache(maxsize=256)
def _bound_in(source: str) -> frozenset[str]:
    return frozenset(name for statement in ast.parse(source).body for name in _bound_names(statement))


def _bound_names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _entry_points(package: str) -> Mapping[str, EntryPoint]:
    return _installed(package, _folders(sys.path))


@functools.lru_cache(maxsize=64)
def _installed(group: str, folders: Folders) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, of the packages in these folders."""
    return {point.name: point for point in _reader(folders)(group)}


@functools.lru_cache(maxsize=4)
def _reader(folders: Folders) -> Callable[[str], EntryPoints]:
    """Return the function that finds a group, after the files of all packages have been read once."""
    found = entry_points()
    return lambda group: found.select(group=group)


def _load_entry_point(point: EntryPoint, attribute: str) -> Any:
    try:
        plugin = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"plugin {point.name!r} ({point.value}) can't be imported: {error}", "reinstall or repair its package."
        ) from error
    if not hasattr(plugin, attribute):
        raise ConfigError(
            f"plugin {point.name!r} ({point.value}) does not define {attribute!r}",
            "uninstall it, or report it to its author.",
        )
    return plugin
