"""The draft-length policy protocol, and the outcomes that a policy observes.

A policy is one module with a function `build(context) -> DraftLength`; the module's name is the policy's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from speculant.metrics import StepTiming
from speculant.scheduling.scheduler import Schedule
from speculant.types import Request


@dataclass(frozen=True)
class DraftOutcome:
    """The outcome of one sequence's draft. Each list has an entry per depth, from the root's children on.

    drafted: nodes of the draft. tested: 1 if the target's distribution was compared with nodes at this depth, 0 after a
    rejection or an end. accepted: 1 if a node was committed, else 0.
    """

    request: Request
    drafted: Sequence[int]
    tested: Sequence[int]
    accepted: Sequence[int]


class DraftLength(Protocol):
    """Chooses draft lengths from past outcomes alone.

    `choose` runs before anything is drawn, so that it can't depend on drawn tokens: that would bias ratio rules.
    keeps_up: whether drafters also process the tokens of sequences whose length is 0, so that no backlog builds up.
    """

    keeps_up: bool

    def choose(self, schedule: Schedule) -> list[int]:
        """Return the wanted number of nodes for each item of the schedule; 0 = no draft.

        The lengths are then cut to the limits of budget, memory, context and drafter. For a beam search the number is
        that of rounds.
        """
        ...

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Record a step: the outcomes of the sequences that had a draft, and the step's timing."""
        ...


@dataclass(frozen=True)
class DraftLengthContext:
    """The values that a policy is built from.

    num_speculative_tokens: the configured length, or the method's usual one. options: the policy's own keys.
    """

    num_speculative_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
