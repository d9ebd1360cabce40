"""A `Chance` that follows every branch: the distribution of what randomised code returns is then summed exactly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from speculant.types import Request

Outcome = TypeVar("Outcome", bound=Hashable)


class TooManyWaysError(Exception):
    """There are more ways to follow than were allowed."""


@dataclass
class Branches:
    """One way through a tree of random decisions: first those of the script, then always the first open one.

    `probability` is that of the way taken. Decisions without probability are no options.
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
    """A `Chance` that asks `Branches`."""

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
    """A source of `Chance` whose every decision belongs to the branches set for the request's id."""

    def __init__(self) -> None:
        self.branches: dict[str, Branches] = {}

    def draft(self, request: Request) -> EnumeratingChance:
        """See `Chances.draft`."""
        return EnumeratingChance(self.branches[request.request_id])

    def verify(self, request: Request) -> EnumeratingChance:
        """See `Chances.verify`."""
        return EnumeratingChance(self.branches[request.request_id])


def enumerate_outcomes(run: Callable[[Branches], Outcome]) -> dict[Outcome, float]:
    """Run until every branch was followed; return each outcome's probability."""
    return enumerate_side_by_side(lambda ways: [run(branches) for branches in ways], width=1)


def enumerate_side_by_side(
    run: Callable[[list[Branches]], list[Outcome]], width: int, most: int | None = None
) -> dict[Outcome, float]:
    """Like `enumerate_outcomes`, for a `run` that follows up to `width` ways at a time.

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
