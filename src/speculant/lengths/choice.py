"""A choice of draft lengths that holds for some steps, and the conditions that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculant.lengths.costs import NO_ATTENTION, AttentionSeconds, StepCosts
from speculant.scheduling.scheduler import Schedule
from speculant.types import Request

LONGEST = 16  # nodes of a draft unless the user sets a number


@dataclass
class Choice:
    """The lengths of a step's sequences, and for how many more steps they hold.

    made_for: for each sequence its id, its rows without a draft, and whether it only decodes. rows: the sum of these
    rows. plain_s: the seconds of a pass over them; attention: those of long texts, and of each node after them. pure:
    whether all sequences only decode, and none is a beam search.
    """

    made_for: list[tuple[int, int, bool]]
    lengths: list[int]
    rows: int
    plain_s: float
    pure: bool
    left: int
    attention: AttentionSeconds = NO_ATTENTION
    asked: list[str] = field(default_factory=list)  # methods with scores that may draft

    @property
    def awaits(self) -> bool:
        """Whether a drafter without scores was called; it takes time even if it drafts nothing."""
        return any(self.lengths) and not self.asked

    def steps_s(self, costs: StepCosts, most: int) -> list[float]:
        """Return the seconds of the step with 0 to `most` nodes, without drafting."""
        return costs.steps_s(self.rows, self.plain_s, most, self.attention)

    def pause(self, watched: int) -> int:
        """Skip the steps before the next one of which `left` is a multiple of `watched`; return their number.

        Nothing is skipped where a sequence does anything but decode.
        """
        steps = (self.left - 1) % watched if self.left and self.pure and not self.asked else 0
        self.left -= steps
        return steps


def identity_of(schedule: Schedule) -> list[tuple[int, int, bool]]:
    """Return the identity of a step's work: see `Choice.made_for`."""
    return [(item.request.seq_id, item.num_rows, item.decodes) for item in schedule.items]


def no_drafts(schedule: Schedule, costs: StepCosts, left: int) -> Choice:
    """Return the choice of no drafts for a number of steps."""
    rows, items = sum(item.num_rows for item in schedule.items), schedule.items
    attention = costs.attention((item.num_rows, item.start + item.count) for item in items)
    plain_s = (costs.passes.at(rows) + attention.plain_s) * costs.undrafted
    return Choice(identity_of(schedule), [0] * len(items), rows, plain_s, True, left, attention)


def scored(method: str) -> str:
    """Return the key for estimates of a method's drafts with scores; its name is the key for drafts without."""
    return f"{method}, scored"


def most_nodes(request: Request, longest: int | None, tree: tuple[int, int] | None, look_ahead_rows: int = 0) -> int:
    """Return the most nodes of a draft: the request's number, else the user's, else a whole tree, or LONGEST.

    tree: nodes and depth of the trees of a method that drafts whole ones. look_ahead_rows: those of a method that
    drafts from them bound its nodes; 0 = it has none.
    """
    asked = request.num_speculative_tokens if request.num_speculative_tokens is not None else longest
    most = asked if asked is not None else tree[0] if tree else LONGEST
    return min(most, look_ahead_rows) if look_ahead_rows else most


def asked_length(request: Request) -> int | None:
    """Return the number of draft tokens that a request sets itself; the cost does not change it."""
    speculation = request.params.speculation
    return speculation.get("num_speculative_tokens") if isinstance(speculation, Mapping) else None
