"""GLM-4.5 and later: `<tool_call>f<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, also on lines."""

from __future__ import annotations

from speculant.serving.tools.parameters import ParameterParser


class GlmParser(ParameterParser):
    """See the module."""

    marker, closing, between = "<tool_call>", "</tool_call>", "\n"
    signs = (marker, "<arg_key>")
    tags = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    name_tags, end = ("", ""), closing
    key_tag, key_ends, value_tags = tags[0], {tags[1]: None}, (tags[2], tags[3])
    line = gap = r'"\n"?'
    outer = (marker, "")


Parser = GlmParser
