"""Qwen3-Coder, Qwen3.5: `<tool_call><function=f><parameter=key>value</parameter></function></tool_call>`, on lines."""

from __future__ import annotations

from speculant.serving.tools.parameters import ParameterParser


class QwenParser(ParameterParser):
    """See the module."""

    marker, closing, between = "<tool_call>", "</tool_call>", "\n"
    signs = (marker, "<function=")
    name_tags, end = ("<function=", ">"), "</function>"
    key_tag, key_ends = "<parameter=", {">": None}
    gap, value_tags = r'"\n"', ("", "\n</parameter>")
    outer = (f"{marker}\n", f"\n{closing}")


Parser = QwenParser
