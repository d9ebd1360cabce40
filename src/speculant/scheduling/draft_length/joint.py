"""The joint choice of all draft lengths of a step: the set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

Seconds = Callable[[int, int, int], float]


class Offer(NamedTuple):
    """What a sequence's draft could grow by.

    gain: the expected number of tokens that it adds. nodes: how many nodes it has. depth: that of its deepest node, 1
    for the root's children. owner: the place of its sequence.
    """

    gain: float
    nodes: int
    depth: int
    owner: int


def chain_offers(survivals: Sequence[Sequence[float]]) -> list[Offer]:
    """Return the offers of chains, a node at a time, from the estimates that each node of each chain is accepted."""
    return [
        Offer(gain, 1, depth, owner) for owner, gains in enumerate(survivals) for depth, gain in enumerate(gains, 1)
    ]


def choose_jointly(
    offers: Sequence[Offer], sequences: int, tokens: int, seconds: Seconds, least_gain: float = 0.0
) -> list[int]:
    """Choose how many nodes of each sequence's offers to draft; these are its first ones.

    offers: those of a sequence come in order, parents first, with gains per node that do not rise. tokens: those that
    the step commits without drafts. seconds(nodes, depth, sequences): what a step takes with so many nodes, in drafts
    that are so deep of so many sequences. Offers are taken in the order of their gain per node, and all numbers of them
    are compared, because costs have cliffs. Drafts must raise the tokens per second by the share `least_gain`.
    """
    order = sorted(offers, key=_by_gain)
    best, taken = (1 + least_gain) * tokens / seconds(0, 0, 0), 0
    expected, nodes, depth, owners = float(tokens), 0, 0, set[int]()
    for count, offer in enumerate(order, 1):
        expected += offer.gain
        nodes += offer.nodes
        depth = max(depth, offer.depth)
        owners.add(offer.owner)
        rate = expected / seconds(nodes, depth, len(owners))
        if rate > best:
            best, taken = rate, count
    counts = [0] * sequences
    for offer in order[:taken]:
        counts[offer.owner] += offer.nodes
    return counts


def _by_gain(offer: Offer) -> float:
    return -offer.gain / offer.nodes
