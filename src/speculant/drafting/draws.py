"""Chains and trees that are drawn without a cache: a function gives the distribution at each node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speculant.drafting.model.trees import Tree, branch
from speculant.drafting.topology import TreeTopology
from speculant.models.base import Chain
from speculant.sampling.chance import Chances
from speculant.sampling.distribution import Node
from speculant.types import DraftTree, Request

NextProbs = Callable[[Sequence[Node]], Tensor]  # nodes -> the distribution [r, V] in float64 of each one's next token


def draw_chains(
    requests: Sequence[Request], limits: Sequence[int], chances: Chances, next_probs: NextProbs
) -> list[DraftTree]:
    """Draw a chain of up to limits[i] tokens for each request, all requests level by level.

    Tokens are drawn as a draft model's are: with the request's draft chance, from the rows that are returned as `probs`
    where a ratio rule verifies. A row without a possible token ends its chain.
    """
    chains = [
        Chain(request, [], limit, chances.draft(request)) for request, limit in zip(requests, limits, strict=True)
    ]
    rows: dict[int, list[Tensor]] = {chain.request.seq_id: [] for chain in chains}
    growing = [chain for chain in chains if chain.limit]
    while growing:
        probs = next_probs([Node(chain.request, chain.tokens) for chain in growing])
        drawable = [0 < total < math.inf for total in probs.sum(-1).tolist()]
        for chain, token_probs in zip(growing, probs, strict=True):
            rows[chain.request.seq_id].append(token_probs)
        growing = [chain for chain, can in zip(growing, drawable, strict=True) if can]
        for chain in growing:
            chain.tokens = [*chain.tokens, chain.chance.draw(rows[chain.request.seq_id][-1])]
        growing = [chain for chain in growing if len(chain.tokens) < chain.limit]
    return [_draft(chain, rows[chain.request.seq_id]) for chain in chains]


def draw_trees(
    drafting: Sequence[tuple[Request, int]], chances: Chances, topology: TreeTopology, next_probs: NextProbs
) -> list[DraftTree]:
    """Draw a tree of a topology for each pair (request, limit), all requests level by level.

    A node without a possible token has no children. Distributions of greedy requests with shared noise are those at
    temperature 1, which rank the tokens.
    """
    trees = [Tree(request, [Chain(request, [], limit, chances.draft(request))]) for request, limit in drafting]
    places = [(tree, -1) for tree in trees]
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


def _draft(chain: Chain, rows: list[Tensor]) -> DraftTree:
    if not chain.tokens:
        return DraftTree.empty()
    emitted = None if chain.request.shared_noise else torch.stack(rows[: len(chain.tokens)])
    return DraftTree.chain(chain.tokens, emitted)
