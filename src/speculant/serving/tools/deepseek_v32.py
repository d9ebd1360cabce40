"""DeepSeek-V3.2: as MiniMax-M2, with a token in elements' names, and an attribute that says whether a value is text."""

from __future__ import annotations

from speculant.serving.tools.parameters import ParameterParser
from speculant.serving.tools.schemas import ANY, TEXT

_DSML = "\uff5cDSML\uff5c"
_KEY_ENDS = {'" string="true">': TEXT, '" string="false">': ANY - TEXT, '">': None}


class DsmlParser(ParameterParser):
    """See the module."""

    marker, closing, between = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>", ""
    signs = (_DSML, "function_calls>")
    tags = (_DSML,)
    name_tags, end = (f'<{_DSML}invoke name="', '">'), f"</{_DSML}invoke>"
    key_tag, key_ends = f'<{_DSML}parameter name="', _KEY_ENDS
    value_tags = ("", f"</{_DSML}parameter>")
    outer, around = ("", "\n"), (f"{marker}\n", closing)


Parser = DsmlParser
