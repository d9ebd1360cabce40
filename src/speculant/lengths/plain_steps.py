"""Times passes without drafts. Where drafts pay, some steps still draft nothing, because only they show that time."""

from __future__ import annotations

from statistics import median

from speculant.lengths.choice import Choice
from speculant.lengths.costs import StepCosts
from speculant.metrics import StepTiming

FIRST_WAIT, LONGEST_WAIT = 128, 1024  # steps with drafts until a trial
CHANGED = 1.15  # if passes with drafts become this many times slower or faster, the others are timed again
BLOCK, MOST_BLOCKS = 4, 8  # steps of a trial's block, and its most blocks
FALLING = 0.97  # of the block before: after a block that takes less, the next one may be faster still
SETTLED = 16  # steps without drafts, after which none is slower because of drafts
WATCHED = 8  # one in this many steps of a pause is timed


class PlainSteps:
    """Uses the times of steps without drafts, and begins trials of such steps.

    A trial continues in blocks of steps while these become faster: weights that drafts displaced from the processor's
    caches come back over some steps. running: whether there is a trial.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self.running = False
        self._wait, self._drafted = FIRST_WAIT, 0  # steps with drafts until the next trial, and since the last one
        self._known_s = 0.0  # the estimated time of a pass then; 0 = there was none
        self._undrafted = 0  # steps since the last one with drafts
        self._block: list[float] = []  # seconds of passes
        self._blocks, self._least_s = 0, 0.0  # of this trial, and the least of their medians

    def due(self) -> bool:
        """Begin a trial if one is due, by the number of steps or a changed time of passes; return whether it is."""
        pass_s = self._costs.passes.at(1)
        self._known_s = self._known_s or pass_s
        if self._drafted >= self._wait:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        elif not self._drafted or self._known_s / CHANGED < pass_s < self._known_s * CHANGED:
            return False
        self._drafted, self._known_s, self.running = 0, pass_s, True
        self._block, self._blocks, self._least_s = [], 0, float("inf")
        return True

    def pause(self, held: Choice) -> int:
        """Return for how many steps after this one a choice is not made again."""
        steps = 0 if self.running else held.pause(WATCHED)
        self._undrafted += steps
        return steps

    def drafted(self) -> int:
        """Count a step with drafts; return their number since the last trial."""
        self._undrafted = 0
        self._drafted += 1
        return self._drafted

    def observe(self, held: Choice, timing: StepTiming) -> None:
        """Use the time of a step without drafts. `held` gets further steps while a trial continues."""
        if held.awaits:  # a drafter was called
            self._undrafted = 0
            return
        self._undrafted += 1
        if self.running:
            self._block.append(timing.verify_s)
            if len(self._block) == BLOCK:
                self._end_block(held)
        elif held.pure and self._undrafted > SETTLED:
            self._costs.observe_undrafted(held.rows, timing.verify_s, held.attention.plain_s)
        else:
            return
        self._costs.observe_plain_rest(timing.rest_s)

    def end(self, held: Choice) -> None:
        """End a trial: use its times."""
        if self.running and self._blocks:
            self._costs.compare_undrafted(held.rows, self._least_s, held.attention.plain_s)
        self.running = False

    def _end_block(self, held: Choice) -> None:
        taken_s, before_s = median(self._block), self._least_s
        self._block, self._blocks, self._least_s = [], self._blocks + 1, min(taken_s, before_s)
        if taken_s < FALLING * before_s and self._blocks < MOST_BLOCKS:
            held.left = BLOCK
        else:
            self.end(held)
