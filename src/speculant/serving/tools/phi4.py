"""Phi-4-mini: `<|tool_call|>[{"name": "f", "arguments": {...}}, ...]<|/tool_call|>`."""

from __future__ import annotations

from speculant.serving.tools.granite import GraniteParser


class PhiParser(GraniteParser):
    """See the module."""

    closing = "<|/tool_call|>"
    signs = ("<|tool|>", "<|/tool|>")


Parser = PhiParser
