"""The served OpenAPI document: FastAPI's, with the bodies that the routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from speculant.serving.protocol import BODIES

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the document of an app's routes."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    kinds = [(kind, "validation") for kind in BODIES.values()]
    named, definitions = models_json_schema(kinds, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {**definitions["$defs"], "ErrorResponse": _ERROR}
    for path, kind in BODIES.items():
        content = {"application/json": {"schema": named[(kind, "validation")]}}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"]["default"] = {
                "description": "An error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
            }
    return document
