"""Prompt lookup: tokens that followed the same tokens earlier in source, prompt or output (arXiv 2211.17192, 3.6).

The tokens after the longest match of up to `prompt_lookup_max` tokens are copied; the latest of equal matches counts.
All sequences of a step are looked up in one call of the native library. Their tables take at most 30 bytes per token of
a text, without the library 220 (reading.py). Proposing and observing take 3 to 13 microseconds a token, whatever the
history.
"""

from __future__ import annotations

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.lookup.reading import LookupDrafter, LookupOptions

METHOD = Method(default_length=5, varies=True)


def build(context: DrafterContext) -> LookupDrafter:
    """Make the drafter; it needs no model."""
    return LookupDrafter(read_options(context, LookupOptions))
