"""The plan of a step: for the whole batch, the draft nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import truediv
from typing import Any, NamedTuple

import numpy as np

from speculant.lengths.costs import NO_ATTENTION, AttentionSeconds, StepCosts
from speculant.scheduling import Schedule
from speculant.types import Request

Array = np.ndarray[Any, Any]
Seconds = Callable[[Array, Array, Array], Array]
LONGEST = 16  # nodes of a draft unless the user sets a number


@dataclass
class StepPlan:
    """The lengths of a step's sequences, and for how many more steps they hold.

    made_for: for each sequence its id, its rows without a draft, and whether it only decodes. rows: the sum of these
    rows. attention: the seconds of long texts, and of each node after them.
    pure: whether all sequences only decode, and none is a beam search. gain: the share by which drafts without scores
    are expected to raise the tokens per second; rate: these tokens per second. planned: methods without
    scores that draft. asked: methods that are called because they may draft. seconds: of the step by nodes, as far as
    they are known; none after the costs have changed.
    """

    made_for: list[tuple[int, int, bool]]
    lengths: list[int]
    rows: int
    attention: AttentionSeconds = NO_ATTENTION
    pure: bool = True
    left: int = 0
    gain: float = 0.0
    rate: float = 0.0
    planned: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def plain(cls, schedule: Schedule, made_for: list[tuple[int, int, bool]], costs: StepCosts, left: int) -> StepPlan:
        """Return the plan that drafts nothing for a number of steps."""
        rows, keys = list[int](), list[int]()
        for (_, own, _), item in zip(made_for, schedule.items, strict=True):
            rows.append(own)
            keys.append(item.start + item.count)
        return cls(made_for, [0] * len(rows), sum(rows), costs.attention(rows, keys), left=left)

    def steps_s(self, costs: StepCosts, most: int) -> list[float]:
        """Return the seconds of the step with 0 to at least `most` nodes, without drafting."""
        if len(self.seconds) <= most:
            self.seconds = costs.steps_s(self.rows, len(self.lengths), max(most, LONGEST), self.attention)
        return self.seconds


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
    offers, costs = Offers.of(survivals), np.array(seconds)
    return choose_jointly(offers, len(survivals), lambda nodes, sequences, depth: costs[nodes]).counts


class Offers(NamedTuple):
    """Nodes by which the drafts of a step could grow, in arrays with an entry for each; those of a sequence in order.

    gain: the probability that it is accepted, or the expected tokens of a whole tree. depth: 1 for the root's children.
    owner: the place of its sequence. nodes: of each. seconds(nodes, sequences, depth): see `choose_jointly`.
    """

    gain: Array
    depth: Array
    owner: Array
    nodes: int = 1

    @classmethod
    def of(cls, survivals: Sequence[Sequence[float]], depth: int = 0, nodes: int = 1) -> Offers:
        """Return the offers of sequences, from the estimates that each node is accepted with all before it.

        depth: of all offers; 0 = a chain's nodes are one below the other.
        """
        sizes = list(map(len, survivals))
        gain = np.fromiter(chain.from_iterable(survivals), float, sum(sizes))
        depths = np.full(len(gain), depth) if depth else np.concatenate([np.arange(1, size + 1) for size in sizes])
        return cls(gain, depths, np.repeat(np.arange(len(sizes)), sizes), nodes)


class Chosen(NamedTuple):
    """The nodes of each sequence, and by which share they raise the tokens per second."""

    counts: list[int]
    gain: float


def choose_jointly(offers: Offers, sequences: int, seconds: Seconds) -> Chosen:
    """Choose which offers to draft.

    seconds(nodes, sequences, depth): arrays of the time of steps with so many nodes in drafts of a depth for some of
    the sequences. For each greatest depth, offers are taken in the order of their gain, and all numbers of them are
    compared, because costs have cliffs.
    """
    if not len(offers.gain):
        return Chosen([0] * sequences, 0.0)
    order = np.argsort(-offers.gain, kind="stable")
    depth, owner, most = offers.depth[order], offers.owner[order], int(offers.depth.max())
    caps = np.arange(1, most + 1)[:, None] if sequences > 1 and offers.nodes == 1 else np.array([[most]])
    taken = depth <= caps
    gain = np.where(taken, offers.gain[order], 0.0).cumsum(axis=1)
    begun = (taken & _firsts(owner)).cumsum(axis=1)
    deepest = np.minimum(caps, np.maximum.accumulate(depth))
    rates = (sequences + gain) / seconds(taken.cumsum(axis=1) * offers.nodes, begun, deepest)
    cap, last = divmod(int(rates.argmax()), len(order))
    none = np.zeros(1, int)
    share = float(rates[cap, last] * seconds(none, none, none)[0] / sequences - 1)
    if share <= 0:
        return Chosen([0] * sequences, 0.0)
    counts = np.bincount(owner[: last + 1][taken[cap, : last + 1]], minlength=sequences) * offers.nodes
    return Chosen(counts.tolist(), share)


def _firsts(values: Array) -> Array:
    """Return for each value whether it is the first of its kind."""
    firsts = np.zeros(len(values), bool)
    firsts[np.unique(values, return_index=True)[1]] = True
    return firsts


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
