"""Long drafts that end after an unlikely token.

A draft model's draft ends after a token that the model gives a probability below the threshold; that token is kept. The
tokens before it decide where a draft ends, and no token that was drawn is taken away, so ratio rules stay exact. A
deterministic draft with scores ends after a node with a score below the threshold, a tree after the last node without
such an ancestor. Other drafts have the whole length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from speculant.errors import ConfigError, suggest
from speculant.lengths.base import LONGEST, DraftLengthContext, ScoredDraft
from speculant.lengths.fixed import Fixed

THRESHOLD = 0.4


class Confidence(Fixed):
    """See the module's docstring. length: the most nodes of a draft; a request may set another number."""

    def __init__(self, length: int, threshold: float) -> None:
        super().__init__(length)
        self._threshold = threshold

    @override
    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        return [self._kept(draft) for draft in drafts]

    def _kept(self, draft: ScoredDraft) -> int:
        """Return how many nodes there are up to the last one whose ancestors all have a score above the threshold."""
        kept, sure = 0, list[bool]()
        for node, (parent, score) in enumerate(zip(draft.parents, draft.scores, strict=True)):
            reached = parent < 0 or sure[parent]
            kept = node + 1 if reached else kept
            sure.append(reached and score >= self._threshold)
        return kept


def stop_below(options: Mapping[str, Any]) -> float:
    """Read the option `threshold`: a probability above 0. Raises ConfigError."""
    threshold = options.get("threshold", THRESHOLD)
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold <= 1:
        raise ConfigError(
            f"draft_length has the threshold {threshold!r}, which is not a probability above 0",
            f"use for example {THRESHOLD}.",
        )
    return float(threshold)


def build(context: DraftLengthContext) -> Confidence:
    """Make the policy; its option is `threshold`."""
    for key in context.options:
        if key != "threshold":
            raise ConfigError(f"draft_length has the unknown key {key!r}", suggest(key, ["policy", "threshold"]))
    length = LONGEST if context.longest is None else context.longest
    return Confidence(length, stop_below(context.options))
