"""The configured length for every request; a request may set another one."""

from __future__ import annotations

from typing_extensions import override

from speculant.errors import ConfigError
from speculant.lengths.base import DraftLength, DraftLengthContext
from speculant.scheduling import Schedule


class Fixed(DraftLength):
    """See the module's docstring."""

    def __init__(self, length: int) -> None:
        self._length = length

    @override
    def choose(self, schedule: Schedule) -> list[int]:
        lengths = list[int]()
        for item in schedule.items:
            own = item.request.drafts.num_tokens
            lengths.append(self._length if own is None else own)
        return lengths


def build(context: DraftLengthContext) -> Fixed:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", "remove it; the fixed length has no options.")
    return Fixed(context.num_speculative_tokens)
