"""The joint choice of all draft lengths of a step: the set of nodes with the most expected tokens per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from speculant.scheduling.costs import Floats, Integers

Seconds = Callable[[Integers, Integers, Integers], Floats]


@dataclass(frozen=True)
class Offers:
    """What the drafts of a step could grow by, one entry per increment; a sequence's come in order, parents first.

    gains: the expected number of tokens that each adds. nodes: how many nodes it has. depths: that of its deepest node,
    1 for the root's children. owners: the places of the sequences, from 0 to sequences - 1.
    """

    gains: Floats
    nodes: Integers
    depths: Integers
    owners: Integers
    sequences: int

    @classmethod
    def chains(cls, survivals: Floats, most: Integers) -> Offers:
        """Return chains, a node at a time: survivals [n, L] that each node is accepted, and the most nodes of each."""
        sequences, longest = survivals.shape
        depths = np.arange(1, longest + 1)
        possible = (depths <= most[:, None]).ravel()
        owners = np.repeat(np.arange(sequences), longest)[possible]
        nodes = np.ones(len(owners), dtype=np.int64)
        return cls(survivals.ravel()[possible], nodes, np.tile(depths, sequences)[possible], owners, sequences)


def choose_jointly(offers: Offers, tokens: int, seconds: Seconds, least_gain: float = 0.0) -> list[int]:
    """Choose how many nodes of each sequence's increments to draft; these are its first ones.

    tokens: those that the step commits without drafts. seconds(nodes, depths, sequences): what steps take with so many
    nodes, in drafts that are so deep of so many sequences. Increments come in the order of their gain per node, which
    must fall along each sequence's. All numbers of them are compared, because costs have cliffs. Drafts must raise the
    tokens per second by the share `least_gain`.
    """
    order = np.argsort(-offers.gains / offers.nodes, kind="stable")
    first = np.zeros(len(order), dtype=np.int64)
    first[np.unique(offers.owners[order], return_index=True)[1]] = 1
    expected = tokens + np.concatenate(([0.0], np.cumsum(offers.gains[order])))
    nodes = np.concatenate(([0], np.cumsum(offers.nodes[order])))
    depths = np.concatenate(([0], np.maximum.accumulate(offers.depths[order])))
    rates = expected / seconds(nodes, depths, np.concatenate(([0], np.cumsum(first))))
    rates[0] *= 1 + least_gain
    taken = order[: int(np.argmax(rates))]
    counts: list[int] = np.bincount(offers.owners[taken], offers.nodes[taken], offers.sequences).astype(int).tolist()
    return counts
