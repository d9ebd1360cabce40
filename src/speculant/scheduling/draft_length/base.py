"""What a draft-length policy is, and what it learns from.

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
    """What became of one sequence's draft. Each list has an entry per depth, from the root's children on.

    drafted: nodes of the draft. tested: 1 if the target's distribution was compared with nodes at this depth, 0 after a
    rejection or an end. accepted: 1 if a node was committed, else 0.
    """

    request: Request
    drafted: Sequence[int]
    tested: Sequence[int]
    accepted: Sequence[int]


class DraftLength(Protocol):
    """Chooses draft lengths from the past alone.

    It is asked before anything is drawn, so that it cannot look at drawn tokens: that would bias ratio rules.
    keeps_up: whether drafters shall process the tokens of sequences whose length is 0, so that a later draft need not.
    """

    keeps_up: bool

    def choose(self, schedule: Schedule) -> list[int]:
        """Return the wanted number of nodes for each item of the schedule; 0 = no draft.

        The lengths are then cut to what budget, memory, context and drafter leave room for. In a beam search the number
        is that of rounds.
        """
        ...

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Take note of a step: outcomes of the sequences that had a draft, and where the time went."""
        ...


@dataclass(frozen=True)
class DraftLengthContext:
    """What a policy is built from.

    num_speculative_tokens: the configured length, or the method's usual one. options: the policy's own keys.
    """

    num_speculative_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
