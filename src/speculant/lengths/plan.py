"""The plan of a step: for the whole batch, the draft nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, islice, repeat
from operator import truediv
from typing import NamedTuple

from speculant.lengths.acceptance import MethodAcceptance
from speculant.lengths.costs import NO_ATTENTION, AttentionSeconds, StepCosts
from speculant.scheduling.scheduler import Schedule
from speculant.tree import depths_of
from speculant.types import Request

Seconds = Callable[[int, int, int], float]
LONGEST = 16  # nodes of a draft unless the user sets a number


@dataclass
class Plan:
    """The lengths of a step's sequences, and for how many more steps they hold.

    made_for: for each sequence its id, its rows without a draft, and whether it only decodes. rows: the sum of these
    rows. plain_s: the seconds of a step without drafts; attention: those of long texts, and of each node after them.
    pure: whether all sequences only decode, and none is a beam search. gain: by how many plain steps' tokens a step
    with these drafts is expected to be ahead. asked: methods with scores that may draft.
    """

    made_for: list[tuple[int, int, bool]]
    lengths: list[int]
    rows: int
    plain_s: float
    attention: AttentionSeconds = NO_ATTENTION
    pure: bool = True
    left: int = 0
    gain: float = 0.0
    asked: list[str] = field(default_factory=list)

    @classmethod
    def plain(cls, schedule: Schedule, costs: StepCosts, left: int) -> Plan:
        """Return the plan that drafts nothing for a number of steps."""
        rows, items = sum(item.num_rows for item in schedule.items), schedule.items
        attention = costs.attention((item.num_rows, item.start + item.count) for item in items)
        return cls(identity_of(schedule), [0] * len(items), rows, costs.plain_s(rows, attention), attention, left=left)

    def steps_s(self, costs: StepCosts, most: int) -> list[float]:
        """Return the seconds of the step with 0 to `most` nodes, without drafting."""
        return costs.steps_s(self.rows, self.plain_s, most, self.attention)


def identity_of(schedule: Schedule) -> list[tuple[int, int, bool]]:
    """Return the identity of a step's work: see `Plan.made_for`."""
    return [(item.request.seq_id, item.num_rows, item.decodes) for item in schedule.items]


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
    return choose_jointly(offers, len(survivals), len(survivals), lambda nodes, depth, sequences: seconds[nodes])[0]


def choose_jointly(
    offers: Sequence[Offer], sequences: int, tokens: int, seconds: Seconds, least_gain: float = 0.0
) -> tuple[list[int], float]:
    """Choose how many nodes of each sequence's offers to draft, its first ones; return them and what they gain.

    offers: those of a sequence come in order, parents first, with gains per node that do not rise. tokens: those that
    the step commits without drafts. seconds(nodes, depth, sequences): the time of a step with drafts of a depth for
    some sequences, which have `nodes` nodes together. Offers are taken in the order of their gain per node, and all
    numbers of them are compared, because costs have cliffs. The gain is the share by which the tokens per second rise;
    drafts must gain `least_gain`.
    """
    counts = [0] * sequences
    if not offers:
        return counts, 0.0
    order = sorted(offers, key=_by_gain)
    gains, nodes, depths, owners = zip(*order, strict=True)
    expected = accumulate(gains, initial=float(tokens))
    costs = map(seconds, accumulate(nodes), accumulate(depths, max), accumulate(_firsts(owners)))
    rates = list(map(truediv, islice(expected, 1, None), costs))
    best = max(rates)
    gain = best * seconds(0, 0, 0) / tokens - 1
    if gain > least_gain:
        for offer in order[: 1 + rates.index(best)]:
            counts[offer.owner] += offer.nodes
    return counts, max(0.0, gain)


def _firsts(values: Sequence[int]) -> list[bool]:
    """Return for each value whether it is the first of its kind."""
    places = dict(zip(reversed(values), reversed(range(len(values))), strict=True))
    firsts = [False] * len(values)
    for place in places.values():
        firsts[place] = True
    return firsts


def _by_gain(offer: Offer) -> float:
    return -offer.gain / offer.nodes


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
