"""Reads the arguments of `serve run speculant.ray:app`, which are text, or values of a YAML file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from speculant.config import EngineConfig
from speculant.errors import ConfigError, suggest
from speculant.scale.options import REPLICA_FIELDS, ReplicaOptions, replica_range
from speculant.serving.options import ServerOptions

# What Ray's proxies do in place of our server, or what Ray's own commands set.
PROXIES = frozenset(
    {
        *("host", "port", "header_timeout", "max_connections", "max_connections_per_address", "trusted_proxies"),
        *("drain_timeout", "access_log", "ray_address"),
    }
)


def read_arguments(args: Mapping[str, Any]) -> tuple[dict[str, Any], ServerOptions, ReplicaOptions]:
    """Return the engine's arguments, the server's options and those of the replicas.

    The engine's arguments may also be in the environment as SPECULANT_<NAME>, and an API key as SPECULANT_API_KEY.
    Raises ConfigError for an unknown name, one that has no effect behind Ray's proxies, a value of a wrong type, or a
    missing model.
    """
    engine, server = ({field.name for field in fields(kind)} for kind in (EngineConfig, ServerOptions))
    given = {name: value for name in engine if (value := os.environ.get(f"SPECULANT_{name.upper()}"))} | dict(args)
    known = {*engine, *server, *REPLICA_FIELDS}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"{unknown[0]!r} is no argument", suggest(unknown[0], sorted(known)))
    if useless := sorted(set(given) & PROXIES):
        raise ConfigError(f"{useless[0]!r} has no effect behind Ray's proxies", "leave it out, and set up the proxies.")
    values = {name: _typed(EngineConfig, name, given[name]) for name in sorted(engine & set(given))}
    if "model" not in values:
        raise ConfigError("no model is given", "serve run speculant.ray:app model=PATH_OR_ID")
    options = {name: _typed(ServerOptions, name, given[name]) for name in sorted(server & set(given))}
    if "api_keys" not in options and (key := os.environ.get("SPECULANT_API_KEY")):
        options["api_keys"] = (key,)
    replicas: dict[str, Any] = {
        field: replica_range(given[name]) if field == "replicas" else _typed(ReplicaOptions, field, given[name])
        for name, field in REPLICA_FIELDS.items()
        if name in given
    }
    return values, ServerOptions(**options), ReplicaOptions(**replicas)


def _typed(kind: type, name: str, value: Any) -> Any:
    """Return a field's value; text may be JSON. Raises ConfigError for a value of another type."""
    wanted = TypeAdapter(get_type_hints(kind)[name])
    candidates = [value]
    if isinstance(value, str):
        with suppress(ValueError):
            candidates.append(json.loads(value))
        low, colon, high = value.partition(":")
        candidates += [value.split(","), *([[low, high]] if colon else [])]
    for each in candidates:
        try:
            return wanted.validate_python(each)
        except ValidationError:
            continue
    shown = name if name == "api_keys" else f"{name}={value!r}"
    raise ConfigError(f"{shown} has the wrong type", f"give {wanted.json_schema().get('type', 'JSON')}.")
