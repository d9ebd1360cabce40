"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {...}}, ...]`."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from speculant.serving.tools.base import CallShape, Tool, object_shape
from speculant.serving.tools.hermes import HermesParser


class GraniteParser(HermesParser):
    """See the module."""

    marker, between = "<|tool_call|>", ", "
    closing: ClassVar[str | None] = None
    signs: ClassVar[tuple[str, ...]] = (marker,)

    @classmethod
    @override
    def shape(cls, tool: Tool, template: str | None = None) -> CallShape:
        return object_shape(tool, "", tags=cls.markers(), around=(f"{cls.marker}[", f"]{cls.closing or ''}"))


Parser = GraniteParser
