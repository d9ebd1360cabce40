"""The configured length for every request; a request may set another one."""

from __future__ import annotations

from collections.abc import Sequence

from speculant.errors import ConfigError
from speculant.lengths.base import DraftLengthContext, DraftOutcome
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule


class Fixed:
    """See the module's docstring."""

    keeps_up = False

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, schedule: Schedule) -> list[int]:
        """See `DraftLength.choose`."""
        lengths = list[int]()
        for item in schedule.items:
            own = item.request.num_speculative_tokens
            lengths.append(self._length if own is None else own)
        return lengths

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """See `DraftLength.observe`; the length stays the same."""


def build(context: DraftLengthContext) -> Fixed:
    """Make the policy; it has no options of its own."""
    for key in context.options:
        raise ConfigError(f"draft_length has the unknown key {key!r}", "remove it; the fixed length has no options.")
    return Fixed(context.num_speculative_tokens)
