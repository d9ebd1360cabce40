"""The joint choice of all draft lengths of a step: the set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Increment:
    """Nodes that one sequence's draft could grow by; they come together.

    gain: the expected number of tokens that they add. depth: that of the deepest of them, 1 for the root's children.
    """

    gain: float
    nodes: int
    depth: int


def chain(survivals: Sequence[float]) -> list[Increment]:
    """Return a chain's increments of a node each; survivals are the probabilities that each node is accepted."""
    return [Increment(survival, 1, depth) for depth, survival in enumerate(survivals, 1)]


def choose_jointly(
    offers: Sequence[Sequence[Increment]],
    tokens: int,
    seconds: Callable[[int, int, int], float],
    least_gain: float = 0.0,
) -> list[int]:
    """Choose how many nodes of each sequence's increments to draft; these are its first ones.

    tokens: those that the step commits without drafts. seconds(nodes, depth, sequences): what the step takes with so
    many nodes, in drafts of so many sequences that are so deep. Increments come in the order of their gain per node,
    which falls along each sequence's. All numbers of nodes are compared, because costs have cliffs. Drafts must raise
    the tokens per second by the share `least_gain`.
    """
    order = sorted(
        ((each.gain / each.nodes, -place, index) for index, own in enumerate(offers) for place, each in enumerate(own)),
        reverse=True,
    )
    best, taken = tokens / seconds(0, 0, 0) * (1 + least_gain), 0
    expected, nodes, depth = float(tokens), 0, 0
    drafting = set[int]()
    for count, (_, place, index) in enumerate(order, 1):
        step = offers[index][-place]
        expected, nodes, depth = expected + step.gain, nodes + step.nodes, max(depth, step.depth)
        drafting.add(index)
        if (rate := expected / seconds(nodes, depth, len(drafting))) > best:
            best, taken = rate, count
    counts = [0] * len(offers)
    for _, place, index in order[:taken]:
        counts[index] += offers[index][-place].nodes
    return counts
