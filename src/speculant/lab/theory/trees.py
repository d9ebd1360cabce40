"""Static draft trees: expected accepted tokens, and the best shape of a size (Sequoia, Chen et al., arXiv 2402.12374).

`rates[r]` is the probability that the child of rank r is the accepted one, given that its parent was accepted and has
such a child. It is not conditioned on the elder siblings: of all visits to a parent, rates[r] end at rank r. So rates
sum to at most 1, and the rest is the probability that no child is accepted. If h_r is the probability that rank r is
accepted after its elder siblings were rejected,

    rates[r] = h_r (1 - h_0) (1 - h_1) .. (1 - h_{r-1})

A shape is a list of paths: the ranks from the root down to each node, parents and elder siblings among them. Rates are
assumed to be the same at every node, whatever its ancestors (the paper's positional acceptance), so a node of path
r_1 .. r_d is accepted with probability rates[r_1] .. rates[r_d], and these add up to the expected number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speculant.lab.theory.speedup import Array


def expected_accepted(paths: Sequence[Sequence[int]], rates: Sequence[float]) -> float:
    """Return the expected number of accepted nodes of a shape; one more token always follows.

    Raises ValueError for invalid rates, a shape that lacks a parent or an elder sibling, or a rank without rate.
    """
    _check_rates(rates)
    _check_shape(paths, len(rates))
    return math.fsum(math.prod(rates[rank] for rank in path) for path in paths)


def best_tree(
    rates: Sequence[float], nodes: int, max_depth: int | None = None, max_children: int | None = None
) -> list[list[int]]:
    """Return the shape of `nodes` nodes that has the most accepted nodes in expectation.

    No node has a rank beyond the given rates. Parents come before children, level by level. The time is proportional to
    levels times ranks times nodes squared. Raises ValueError for invalid rates, and if the bounds leave no room for the
    nodes.
    """
    _check_rates(rates)
    for name, bound in (("nodes", nodes), ("max_depth", max_depth), ("max_children", max_children)):
        if bound is not None and bound < 1:
            raise ValueError(f"{name}={bound} is not a whole number above 0; use for example 8")
    depth = min(max_depth or nodes, nodes)
    sizes = _elder_sizes(rates[: min(max_children or nodes, nodes)], nodes, depth)
    if sizes[0, 0, nodes] == 0:
        raise ValueError(
            f"{nodes} nodes don't fit into depth {depth} with {sizes.shape[1]} children a node; raise a bound, give "
            "more rates, or ask for fewer nodes"
        )
    return sorted(_paths(sizes, [], 0, nodes), key=lambda path: (len(path), path))


def _elder_sizes(rates: Sequence[float], nodes: int, depth: int) -> NDArray[np.int64]:
    """Return sizes [depth, R, nodes + 1]: the best use of n nodes below a parent whose next child has rank r.

    sizes[d, r, n] of them are that child, at depth d + 1, and its descendants; the others are its younger siblings.
    0 = n nodes can't be placed, or n = 0. With G the most expected accepted nodes of n,

        G(d, r, n) = max over m of  rates[r] (1 + G(d + 1, 0, m - 1)) + G(d, r + 1, n - m)
    """
    sizes = np.zeros((depth, len(rates), nodes + 1), dtype=np.int64)
    nothing = np.full(nodes + 1, -np.inf)
    nothing[0] = 0.0
    below = nothing
    for level in reversed(range(depth)):
        most = nothing
        for rank in reversed(range(len(rates))):
            most, sizes[level, rank] = _share(_grown(below, rates[rank]), most)
        below = most
    return sizes


def _grown(below: Array, rate: float) -> Array:
    """Return the expected accepted nodes of a child's subtree of m nodes, [N + 1]; -inf where they can't be placed."""
    grown = np.full_like(below, -np.inf)
    possible = np.flatnonzero(np.isfinite(below[:-1]))
    grown[possible + 1] = rate * (1 + below[possible])
    return grown


def _share(child: Array, younger: Array) -> tuple[Array, NDArray[np.int64]]:
    """Share n nodes between a child (at least one) and its younger siblings; return the most and the child's part."""
    sizes = np.arange(len(child))
    rest = sizes[:, None] - sizes[None, :]  # [n, m]
    totals = np.where(rest >= 0, child + younger[rest], -np.inf)
    most, part = totals.max(axis=1), totals.argmax(axis=1)
    most[0] = 0.0
    return most, np.where(np.isfinite(most), part, 0)


def _paths(sizes: NDArray[np.int64], above: list[int], rank: int, nodes: int) -> list[list[int]]:
    """Read the paths of `nodes` nodes below `above`, from a child of this rank on."""
    paths: list[list[int]] = []
    while nodes:
        child = int(sizes[len(above), rank, nodes])
        own = [*above, rank]
        paths += [own, *_paths(sizes, own, 0, child - 1)]
        nodes, rank = nodes - child, rank + 1
    return paths


def _check_rates(rates: Sequence[float]) -> None:
    sound = all(0 <= rate <= 1 for rate in rates) and math.fsum(rates) <= 1 + 1e-9
    if not len(rates) or not sound:
        raise ValueError(
            f"rates {list(rates)} are not probabilities of which at most one comes true; give, by rank, how often a "
            "child is the accepted one, of all visits to its parent"
        )


def _check_shape(paths: Sequence[Sequence[int]], ranks: int) -> None:
    given = {tuple(path) for path in paths}
    known = given | {()}
    for path in given:
        if not path or path[:-1] not in known or not all((*path[:-1], elder) in known for elder in range(path[-1])):
            raise ValueError(f"{list(path)} is no node, or its parent or an elder sibling is missing; add them")
        if not 0 <= path[-1] < ranks:
            raise ValueError(f"{list(path)} has a rank without a rate, of {ranks}; measure more ranks")
    if len(given) < len(paths):
        raise ValueError("a path is given twice; leave one out")
