"""Trees of tokens that one model draws, or several together, level by level.

Each pass feeds a tree so far anew: its rows are nearly free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speculant.drafting.growth.chains import fit_vocabulary
from speculant.drafting.growth.runner import DraftModelRunner
from speculant.drafting.growth.topology import Distributions, Pick, TreeTopology
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import Chain, SequenceInput, build_batch, known
from speculant.sampling.chance import KeyedNoise
from speculant.sampling.distribution import Node, distribution
from speculant.tree import tokens_to
from speculant.types import DraftTree, Request


@dataclass(eq=False)
class Tree:
    """One request's share of a round. `plans`: what each source feeds and has room for; None = nothing at all."""

    request: Request
    plans: list[Chain | None]
    nodes: list[Any] = field(default_factory=list)  # what the branching knows each one by
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    newest: int = 0  # the first node of the deepest level

    @property
    def limit(self) -> int:
        """How many nodes it may have: as many as every source that is not behind has room for."""
        return min((plan.limit for plan in self.plans if plan and plan.limit), default=0)

    def speakers(self) -> list[int]:
        """Return the sources that are not behind."""
        return [source for source, plan in enumerate(self.plans) if plan and plan.limit]

    def draft(self) -> DraftTree:
        """Return the tree so far; distributions are told where a ratio rule may ask for them."""
        probs = torch.stack(self.probs) if self.probs and not self.request.shared_noise else None
        return DraftTree.of(self.tokens, self.parents, probs)

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node; empty for the root (-1)."""
        return tokens_to(node, self.tokens, self.parents)


def plan_trees(sources: Sequence[DraftModelRunner], drafting: Sequence[tuple[Request, int]]) -> list[Tree]:
    """Decide what every source feeds for requests that want so many nodes each."""
    trees = [Tree(request, [None] * len(sources)) for request, _ in drafting]
    by_request = {tree.request.seq_id: tree for tree in trees}
    for place, source in enumerate(sources):
        for plan in source.plan(drafting):
            by_request[plan.request.seq_id].plans[place] = plan
    return trees


def grow_trees(
    sources: Sequence[DraftModelRunner],
    trees: Sequence[Tree],
    topology: TreeTopology,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
) -> None:
    """Draw every tree's nodes as planned; afterwards the sources' caches hold committed tokens alone."""
    grower = _Grower(sources, topology, vocab_size, sampler)
    growing = grower.begin(trees)
    while growing:
        growing = grower.extend(growing)
    for tree in trees:
        for source in tree.speakers():
            sources[source].cache.truncate_to(tree.request.seq_id, len(tree.request.tokens))


_Place = tuple[Tree, int]  # a node of a tree; -1 = its root


@dataclass(frozen=True)
class _Grower:
    sources: Sequence[DraftModelRunner]
    topology: TreeTopology
    vocab_size: int
    sampler: Sampler

    def begin(self, trees: Sequence[Tree]) -> list[Tree]:
        """Feed the committed tokens and draw the roots' children; return the trees that want more."""
        heard = []
        for place, source in enumerate(self.sources):
            plans = [(tree, plan) for tree in trees if (plan := tree.plans[place])]
            size = source.model.vocab_size
            inputs = [
                SequenceInput(plan.request.seq_id, known(plan.input_tokens, size), DraftTree.empty())
                for _, plan in plans
            ]
            heard.append(self._listen(source, inputs, [[(tree, -1)] * (plan.limit > 0) for tree, plan in plans]))
            for _, plan in plans:
                source.note(plan.request, plan.input_tokens)
        return self._draw([(tree, -1) for tree in trees if tree.limit], heard)

    def extend(self, trees: Sequence[Tree]) -> list[Tree]:
        """Feed the trees so far behind their roots, and draw below the newest level."""
        places = {tree: [(tree, node) for node in range(tree.newest, len(tree.tokens))] for tree in trees}
        heard = []
        for place, source in enumerate(self.sources):
            fed = [tree for tree in trees if place in tree.speakers()]
            heard.append(self._listen(source, [_so_far(tree, source) for tree in fed], [places[tree] for tree in fed]))
        return self._draw([each for tree in trees for each in places[tree]], heard)

    def _listen(
        self, source: DraftModelRunner, feeds: Sequence[SequenceInput], asked: Sequence[Sequence[_Place]]
    ) -> dict[_Place, Tensor]:
        """Feed a source and return the distributions behind what was asked for: each feed's last rows."""
        if not feeds:
            return {}
        model, cache = source.model, source.cache
        hidden = model.forward(build_batch(feeds, cache, model.cache_shape.device), cache.storage).last
        places, rows, end = list[_Place](), list[int](), 0
        for feed, wanted in zip(feeds, asked, strict=True):
            end += len(feed.tokens) + feed.tree.size
            rows += range(end - len(wanted), end)
            places += wanted
        if not rows:
            return {}
        logits = fit_vocabulary(model.logits(hidden[rows]), self.vocab_size)
        nodes = [Node(tree.request, tree.path(node), softened=tree.request.shared_noise) for tree, node in places]
        return dict(zip(places, distribution(logits, nodes, self.sampler), strict=True))

    def _draw(self, places: Sequence[_Place], heard: Sequence[dict[_Place, Tensor]]) -> list[Tree]:
        """Draw children below nodes; return the trees that want more."""
        before = {tree: len(tree.tokens) for tree, _ in places}
        for tree, node in places:
            self._branch(tree, node, [probs.get((tree, node)) for probs in heard])
        for tree, size in before.items():
            tree.newest = size
        return [tree for tree, size in before.items() if size < len(tree.tokens) < tree.limit]

    def _branch(self, tree: Tree, node: int, probs: Distributions) -> None:
        known_by = tree.nodes[node] if node >= 0 else self.topology.root
        pick = picker(tree, len(tree.path(node)))
        topology = self.topology.within(tree.limit)
        for token, child, own in topology.children(known_by, probs, pick, tree.request.shared_noise):
            if len(tree.tokens) < tree.limit:
                tree.nodes.append(child)
                tree.tokens.append(token)
                tree.parents.append(node)
                tree.probs.append(own)


def picker(tree: Tree, depth: int) -> Pick:
    """Return what draws at a depth: the likeliest for a greedy request, the noise of that position, or a stream."""
    chance = next(plan.chance for plan in tree.plans if plan)
    if tree.request.shared_noise and tree.request.params.greedy:
        return lambda token_probs: int(token_probs.argmax())
    if isinstance(chance, KeyedNoise):
        return lambda token_probs: chance.moved(depth).draw(token_probs)
    return chance.draw


def _so_far(tree: Tree, source: DraftModelRunner) -> SequenceInput:
    """Return the feed of a tree's root and nodes, anew."""
    request, model = tree.request, source.model
    source.cache.truncate_to(request.seq_id, len(request.tokens) - 1)
    nodes = DraftTree.of(known(tree.tokens, model.vocab_size), tree.parents)
    return SequenceInput(request.seq_id, known(request.tokens[-1:], model.vocab_size), nodes)
