"""Validates responses by OpenAI's own OpenAPI document, which SPECULANT_OPENAI_SCHEMA names as a JSON file.

The document is not part of this package. Without it the tests check everything else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Check = Callable[[str, Any], None]
_VARIABLE = "SPECULANT_OPENAI_SCHEMA"


@pytest.fixture(scope="session")
def conforms() -> Check:
    """Return a check that a value has a schema of that name; without the document it checks nothing."""
    path = schema_path()
    return _checker(path) if path is not None else lambda name, value: None


def schema_path() -> str | None:
    """Return where the document is; None = it is not there."""
    return os.environ.get(_VARIABLE)


@cache
def _checker(path: str) -> Check:
    validation = pytest.importorskip("jsonschema")
    document = json.loads(Path(path).read_text(encoding="utf-8"))
    components = _with_nulls(document["components"])

    @cache
    def validator(name: str) -> Any:
        schema = {"$ref": f"#/components/schemas/{name}", "components": components}
        return validation.Draft202012Validator(schema)

    def check(name: str, value: Any) -> None:
        errors = sorted(validator(name).iter_errors(value), key=lambda error: list(map(str, error.path)))
        assert not errors, "\n".join(f"{list(error.path)}: {error.message[:300]}" for error in errors[:3])

    return check


def _with_nulls(value: Any) -> Any:
    """Return a schema in which OpenAPI's older `nullable` is a type."""
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    rewritten = {key: _with_nulls(each) for key, each in value.items() if key != "nullable"}
    return {"anyOf": [rewritten, {"type": "null"}]} if value.get("nullable") is True else rewritten
