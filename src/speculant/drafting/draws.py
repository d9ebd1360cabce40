"""Chains and trees that are drawn without a pass of their own: a function gives the distribution at each node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from speculant.drafting.model.runner import draw_along
from speculant.drafting.model.trees import Tree, branch
from speculant.drafting.topology import StaticTree, TreeTopology
from speculant.kernels.base import Sampler
from speculant.models.base import Chain
from speculant.sampling.chance import Chances
from speculant.sampling.distribution import Node, distribution, take_rows, top_tokens
from speculant.types import DraftTree, Request

NextProbs = Callable[[Sequence[Node]], Tensor]  # nodes -> the distribution [r, V] in float64 of each one's next token


def new_chains(drafting: Iterable[tuple[Request, int]], chances: Chances) -> list[Chain]:
    """Return a chain to draw for each pair (request, limit), with the request's draft chance as a draft model has."""
    return [Chain(request, [], limit, chances.draft(request)) for request, limit in drafting]


def draw_chains(chains: Sequence[Chain], next_probs: NextProbs) -> list[DraftTree]:
    """Draw the tokens of chains, all chains level by level, and return their drafts.

    Each has the rows that it was drawn from as `probs` where a ratio rule verifies. See `Chain` for a chain's ends.
    """
    growing = [chain for chain in chains if chain.limit]
    while growing:
        probs = next_probs([Node(chain.request, chain.tokens, chain.softened) for chain in growing])
        unfinished = []
        for chain, token_probs, total in zip(growing, probs, probs.sum(-1).tolist(), strict=True):
            drawn, goes_on = draw_along(chain, DraftTree.empty(), token_probs[None], [total])
            if drawn and chain.emits_probs:
                own = token_probs[None]
                chain.probs = own if chain.probs is None else torch.cat([chain.probs, own])
            if goes_on:
                unfinished.append(chain)
        growing = unfinished
    return [chain.draft() for chain in chains]


def draw_trees(chains: Sequence[Chain], topology: TreeTopology, next_probs: NextProbs) -> list[DraftTree]:
    """Draw a tree of a topology for each of these, within its limit and by its chance, all level by level.

    A node without a possible token has no children. Distributions of greedy requests with shared noise are those at
    temperature 1, which rank the tokens.
    """
    trees = [Tree(chain.request, [chain]) for chain in chains]
    places = [(tree, -1) for tree in trees if tree.limit]
    while places:
        nodes = [Node(tree.request, tree.path(node), tree.request.shared_noise) for tree, node in places]
        before = {tree: len(tree.tokens) for tree, _ in places}
        for (tree, node), token_probs in zip(places, next_probs(nodes), strict=True):
            branch(tree, node, [token_probs], topology)
        places = [
            (tree, node)
            for tree, size in before.items()
            if len(tree.tokens) < tree.limit
            for node in range(size, len(tree.tokens))
            if len(tree.path(node)) < topology.within(tree.limit).depth
        ]
    return [tree.draft() if tree.tokens else DraftTree.empty() for tree in trees]


@dataclass
class DepthProbs:
    """Distributions that depend on a node's depth alone, except for edits such as penalties. Equal ones are made once.

    logits [r, V]. The row of a sequence's nodes at depth d, 0 = below the root, is `first` of the sequence + d * step.
    """

    logits: Tensor
    first: Mapping[int, int]
    step: int
    sampler: Sampler

    def __call__(self, nodes: Sequence[Node]) -> Tensor:
        """Return the distribution of the next token after each node: [n, V]."""
        keys = [(node.request.seq_id, len(node.drafted), *(node.drafted if node.edited else ())) for node in nodes]
        distinct = dict(zip(keys, nodes, strict=True))
        logits = take_rows(self.logits, [self.first[key[0]] + key[1] * self.step for key in distinct])
        probs = distribution(logits, list(distinct.values()), self.sampler)
        index = {key: place for place, key in enumerate(distinct)}
        return take_rows(probs, [index[key] for key in keys])


def likeliest(logits: Tensor, shape: StaticTree) -> DraftTree:
    """Return the tree of the likeliest tokens by rank, for logits [depth, V]."""
    parents, depths, ranks = layout(shape)
    best: list[list[int]] = top_tokens(logits[: max(depths) + 1], 1 + max(ranks)).tolist()
    return DraftTree.of([best[depth][rank] for depth, rank in zip(depths, ranks, strict=True)], parents)


@lru_cache(maxsize=256)
def layout(shape: StaticTree) -> tuple[list[int], list[int], list[int]]:
    """Return the parents, depths (0 = below the root) and ranks of a tree's nodes, level by level."""
    paths = sorted(shape.paths, key=lambda path: (len(path), path))
    places = {path: place for place, path in enumerate(paths)}
    parents = [places.get(path[:-1], -1) for path in paths]
    return parents, [len(path) - 1 for path in paths], [path[-1] for path in paths]
