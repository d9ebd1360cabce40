"""MiniMax-M2: `<invoke name="f"><parameter name="key">value</parameter></invoke>` for each call, in one section."""

from __future__ import annotations

from speculant.serving.tools.parameters import ParameterParser


class MinimaxParser(ParameterParser):
    """See the module."""

    marker, closing, between = "<minimax:tool_call>", "</minimax:tool_call>", ""
    signs = (marker, "<invoke name=")
    name_tags, end = ('<invoke name="', '">'), "</invoke>"
    key_tag, key_ends = '<parameter name="', {'">': None}
    value_tags = ("", "</parameter>")
    outer, around = ("", "\n"), (f"{marker}\n", closing)


Parser = MinimaxParser
