"""Llama 3.1 and later: `{"name": "f", "parameters": {...}}`, with or without `<|python_tag|>` before it.

Without the tag a call can only begin the text. Several calls are separated by ";" or white space.
"""

from __future__ import annotations

from speculant.serving.tools.json import JsonParser
from speculant.serving.tools.schema import CallShape, Tool, object_shape


class LlamaParser(JsonParser):
    """See the module."""

    marker = "<|python_tag|>"

    @classmethod
    def markers(cls) -> tuple[str, ...]:
        """See `ToolParser.markers`."""
        return (cls.marker,)

    @classmethod
    def recognises(cls, template: str) -> bool:
        """See `ToolParser.recognises`."""
        return cls.marker in template or ("<|start_header_id|>" in template and '"parameters"' in template)

    @classmethod
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        """See `ToolParser.shape`."""
        return object_shape(tool, "", key="parameters")


Parser = LlamaParser
