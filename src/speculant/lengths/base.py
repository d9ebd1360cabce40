"""The draft-length policy protocol, and the outcomes that a policy observes.

A policy is one module with a function `build(context) -> DraftLength`; the module's name is the policy's name. It may
also have a function `stop_below(options) -> float`: see `DrafterContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from speculant.lengths.costs import StepCosts
from speculant.metrics import StepTiming
from speculant.scheduling import Schedule
from speculant.types import Request


class DraftOutcome(NamedTuple):
    """What came of one sequence's draft. Each list has an entry per depth, from the root's children on.

    drafted: nodes of the draft. tested: 1 if the target's distribution was compared with nodes at this depth, 0 after a
    rejection or an end. accepted: 1 if a node was committed, else 0. path: the accepted nodes, root to leaf.
    look_ahead_rows: of the draft, in the target's pass. missing: nodes that the drafter was asked for and did not
    return; the lists are empty if it returned none. forced: a constraint forced these nodes, and no drafter was asked.
    """

    request: Request
    drafted: Sequence[int]
    tested: Sequence[int]
    accepted: Sequence[int]
    path: Sequence[int] = ()
    look_ahead_rows: int = 0
    missing: int = 0
    forced: bool = False


class ScoredDraft(NamedTuple):
    """The part of a draft that a policy may see: its shape and the drafter's scores (see `DraftTree`), but no tokens.

    It exists for deterministic drafts alone. If a drawn token were kept or dropped by its own score, the output of a
    ratio rule would have another distribution.
    """

    request: Request
    scores: Sequence[float]
    parents: Sequence[int]


class DraftLength(Protocol):
    """Chooses draft lengths from past outcomes alone.

    `choose` runs before anything is drawn, so that it can't depend on drawn tokens: that would bias ratio rules.
    keeps_up: whether drafters also process the tokens of sequences whose length is 0, so that no backlog builds up.
    """

    keeps_up: bool

    def choose(self, schedule: Schedule) -> list[int]:
        """Return the wanted number of nodes for each item of the schedule; 0 = no draft.

        The lengths are then cut to the limits of budget, memory, context and drafter. For a beam search they are
        numbers of rounds.
        """
        ...

    def observe(self, outcomes: Sequence[DraftOutcome], timing: StepTiming) -> None:
        """Record a step: its timing, and the outcomes of all sequences with a draft or a call for one."""
        ...


class TrimmingLength(DraftLength, Protocol):
    """A policy that also cuts drafts by their scores."""

    def trim(self, drafts: Sequence[ScoredDraft]) -> list[int]:
        """Return how many nodes of each deterministic draft with scores are kept, counted from its first."""
        ...


class PausingLength(DraftLength, Protocol):
    """A policy that is not called in every step while nothing is drafted."""

    def pause(self) -> int:
        """Return for how many steps after this one, which drafts nothing, neither `choose` nor `observe` is called.

        The pause ends early if a sequence comes or goes, or does anything but decode.
        """
        ...


@dataclass(frozen=True)
class DraftLengthContext:
    """The values that a policy is built from.

    num_speculative_tokens: the configured length, or the method's usual one. options: the policy's own keys. longest:
    the configured length alone; None = the policy chooses. costs: measures those of this machine; None = can't. trees:
    nodes and depth of the trees of methods that draft trees without scores. look_ahead_rows: a method's
    `target_inputs`. selects: whether the policy selects between a method's candidate drafters.
    """

    num_speculative_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    costs: Callable[[], StepCosts | None] = lambda: None
    trees: Callable[[str], tuple[int, int] | None] = lambda method: None
    look_ahead_rows: Callable[[str], int] = lambda method: 0
    selects: Callable[[str], bool] = lambda method: False


def num_rows(nodes: int, look_ahead_rows: int, sequences: int = 1) -> int:
    """Return the rows of drafts with a number of nodes, with up to `look_ahead_rows` below each root and node."""
    return nodes + (nodes + sequences) * min(nodes, look_ahead_rows)
