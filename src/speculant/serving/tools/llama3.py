"""Llama 3.1 and later: `{"name": "f", "parameters": {...}}`, with or without `<|python_tag|>` before it.

Without the tag a call can only begin the text. Several calls are separated by ";" or white space.
"""

from __future__ import annotations

from typing_extensions import override

from speculant.serving.tools.base import CallShape, Tool, object_shape
from speculant.serving.tools.json import JsonParser


class LlamaParser(JsonParser):
    """See the module."""

    marker = "<|python_tag|>"

    @classmethod
    @override
    def recognises(cls, template: str) -> bool:
        return cls.marker in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        return object_shape(tool, "", key="parameters")


Parser = LlamaParser
