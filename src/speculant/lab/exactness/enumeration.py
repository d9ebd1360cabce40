"""A `Chance` that follows every branch, so that the exact distribution of a random result is summed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from speculant.types import Request

Outcome = TypeVar("Outcome", bound=Hashable)


class TooManyWaysError(Exception):
    """The enumeration has more branches than allowed."""


@dataclass
class Branches:
    """One path through a tree of random decisions: first those of the script, then always the first option.

    `probability` is that of the path. Options of probability 0 are skipped.
    """

    script: tuple[int, ...] = ()
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    untaken: list[tuple[int, ...]] = field(default_factory=list)

    def decide(self, weights: Sequence[float]) -> int:
        """Return the index of an option, chosen with probability proportional to its weight."""
        options = [index for index, weight in enumerate(weights) if weight > 0]
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            choice = options[0]
            self.untaken += [(*self.taken, other) for other in options[1:]]
        self.taken.append(choice)
        self.probability *= weights[choice] / sum(weights)
        return choice


class EnumeratingChance:
    """A `Chance` whose decisions come from `Branches`."""

    def __init__(self, branches: Branches) -> None:
        self._branches = branches

    def accept(self, probability: float) -> bool:
        """See `Chance.accept`."""
        assert 0 <= probability <= 1, f"{probability} is not a probability"
        return self._branches.decide([1 - probability, probability]) == 1

    def draw(self, weights: Tensor) -> int:
        """See `Chance.draw`."""
        values = [float(weight) for weight in weights.tolist()]
        assert all(value >= 0 for value in values), f"{values} are not weights"
        assert sum(values) > 0, "nothing to draw from"
        return self._branches.decide(values)


class EnumeratingChances:
    """A `Chances` whose decisions come from the branches set for the request's id."""

    def __init__(self) -> None:
        self.branches: dict[str, Branches] = {}

    def draft(self, request: Request) -> EnumeratingChance:
        """See `Chances.draft`."""
        return EnumeratingChance(self.branches[request.request_id])

    def verify(self, request: Request) -> EnumeratingChance:
        """See `Chances.verify`."""
        return EnumeratingChance(self.branches[request.request_id])


def enumerate_outcomes(run: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Run once per branch; return each outcome's probability."""
    return enumerate_side_by_side(lambda ways: [run(branches) for branches in ways], width=1)


def enumerate_side_by_side(
    run: Callable[[list[Branches]], list[Outcome]], width: int, most: int | None = None
) -> dict[Outcome, float]:
    """Like `enumerate_outcomes`, for a `run` that follows up to `width` branches at a time.

    Raises TooManyWaysError as soon as there are more than `most`; None = any number.
    """
    outcomes: dict[Outcome, float] = {}
    pending: list[tuple[int, ...]] = [()]
    followed = 0
    while pending:
        ways = [Branches(script) for script in pending[-width:]]
        del pending[-width:]
        for outcome, branches in zip(run(ways), ways, strict=True):
            outcomes[outcome] = outcomes.get(outcome, 0.0) + branches.probability
            pending += branches.untaken
        followed += len(ways)
        if most is not None and followed + len(pending) > most:
            raise TooManyWaysError
    return outcomes
