"""The joint choice of all draft lengths of a step: the set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, count, islice, repeat
from operator import truediv
from typing import NamedTuple

from speculant.lengths.acceptance import MethodAcceptance
from speculant.tree import depths_of
from speculant.types import Request

Seconds = Callable[[int, int, int], float]


class Offer(NamedTuple):
    """Nodes that a sequence's draft could grow by.

    gain: the expected number of tokens that it adds. nodes: how many nodes it has. depth: that of its deepest node, 1
    for the root's children. owner: the place of its sequence.
    """

    gain: float
    nodes: int
    depth: int
    owner: int


def chain_offers(survivals: Sequence[Sequence[float]]) -> list[Offer]:
    """Return the offers of chains, a node at a time, from the estimates that each node of each chain is accepted."""
    offers = list[Offer]()
    for owner, gains in enumerate(survivals):
        offers += map(Offer, gains, repeat(1), count(1), repeat(owner))
    return offers


def offers_of(
    acceptance: MethodAcceptance,
    requests: Sequence[Request],
    most: Sequence[int],
    tree: tuple[int, int] | None,
    least: float,
) -> list[Offer]:
    """Return the offers of a method's drafts without scores.

    most: nodes of each sequence. tree: nodes and depth of a method that drafts whole trees. least: chains end before
    the first token that is less likely to be accepted with all before it.
    """
    if tree is None or min(most) < tree[0]:
        pairs = zip(requests, most, strict=True)
        return chain_offers([acceptance.survivals(request, longest, least) for request, longest in pairs])
    nodes, depth = tree
    gains = [sum(acceptance.survivals(request, depth)) for request in requests]
    return [Offer(gain, nodes, depth, owner) for owner, gain in enumerate(gains)]


def choose_scored(
    survivals: Sequence[Sequence[float]], parents: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[int]:
    """Choose how many nodes of each draft to verify, from its first one on.

    survivals: estimates that the first nodes of each draft are accepted. parents: those of all its nodes, which come
    parents first, likeliest first. seconds: of steps with 0, 1, ... nodes.
    """
    if len(survivals) == 1:
        rates = list(map(truediv, accumulate(survivals[0], initial=1.0), seconds))
        return [rates.index(max(rates))]
    offers = [
        Offer(gain, 1, depth, owner)
        for owner, (gains, tree) in enumerate(zip(survivals, parents, strict=True))
        for gain, depth in zip(gains, depths_of(tree[: len(gains)]), strict=True)
    ]
    return choose_jointly(offers, len(survivals), len(survivals), lambda nodes, depth, sequences: seconds[nodes])


def choose_jointly(
    offers: Sequence[Offer], sequences: int, tokens: int, seconds: Seconds, least_gain: float = 0.0
) -> list[int]:
    """Choose how many nodes of each sequence's offers to draft; these are its first ones.

    offers: those of a sequence come in order, parents first, with gains per node that do not rise. tokens: those that
    the step commits without drafts. seconds(nodes, depth, sequences): the time of a step with drafts of a depth for
    some sequences, which have `nodes` nodes together. Offers are taken in the order of their gain per node, and all
    numbers of them are compared, because costs have cliffs. Drafts must raise the tokens per second by the share
    `least_gain`.
    """
    counts = [0] * sequences
    if not offers:
        return counts
    order = sorted(offers, key=_by_gain)
    gains, nodes, depths, owners = zip(*order, strict=True)
    expected = accumulate(gains, initial=float(tokens))
    costs = map(seconds, accumulate(nodes), accumulate(depths, max), accumulate(_firsts(owners)))
    rates = list(map(truediv, islice(expected, 1, None), costs))
    best = max(rates)
    if best > (1 + least_gain) * tokens / seconds(0, 0, 0):
        for offer in order[: 1 + rates.index(best)]:
            counts[offer.owner] += offer.nodes
    return counts


def _firsts(values: Sequence[int]) -> list[bool]:
    """Return for each value whether it is the first of its kind."""
    places = dict(zip(reversed(values), reversed(range(len(values))), strict=True))
    firsts = [False] * len(values)
    for place in places.values():
        firsts[place] = True
    return firsts


def _by_gain(offer: Offer) -> float:
    return -offer.gain / offer.nodes
