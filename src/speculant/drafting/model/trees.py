"""Draft trees of one or several models. A tree is drawn level by level, or in one call if `CausalLM.grow` can do that.

Drawn level by level, each pass computes the whole tree again; the additional rows cost little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from speculant.drafting.model.runner import DraftModelRunner, fit_vocabulary
from speculant.drafting.topology import Distributions, Pick, StaticTree, TreeTopology
from speculant.kernels import REFERENCE, Sampler
from speculant.models import Chain, SequenceInput, build_batch, known
from speculant.sampling import KeyedNoise, MostLikely, Node
from speculant.sampling.distribution import distribution
from speculant.tree import tokens_to
from speculant.types import DraftTree, Request


@dataclass(eq=False)
class Tree:
    """One request's tree in a round. `plans`: each source's input tokens and limit; None = it takes no part."""

    request: Request
    plans: list[Chain | None]
    nodes: list[Any] = field(default_factory=list)  # the topology's state of each
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    newest: int = 0  # the first node of the deepest level
    at_once: DraftTree | None = None  # the tree, if one call has drawn it

    @property
    def limit(self) -> int:
        """The most nodes it may have: the smallest limit of the sources without a backlog."""
        return min((plan.limit for plan in self.plans if plan and plan.limit), default=0)

    def drafting_sources(self) -> list[int]:
        """Return the sources without a backlog."""
        return [source for source, plan in enumerate(self.plans) if plan and plan.limit]

    def draft(self) -> DraftTree:
        """Return the tree so far, with probs where a ratio rule may need them."""
        if self.at_once is not None:
            return self.at_once
        probs = torch.stack(self.probs) if self.probs and not self.request.shared_noise else None
        return DraftTree.of(self.tokens, self.parents, probs)

    def known(self, vocab_size: int) -> DraftTree:
        """Return the tokens and parents so far, for a model of `vocab_size` tokens."""
        return DraftTree.of(known(self.tokens, vocab_size), self.parents)

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node; empty for the root (-1)."""
        return tokens_to(node, self.tokens, self.parents)


def plan_trees(sources: Sequence[DraftModelRunner], drafting: Sequence[tuple[Request, int]]) -> list[Tree]:
    """Plan every source's input tokens for pairs (request, wanted nodes)."""
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
    """Draw every tree's nodes as planned; afterwards the sources' caches hold only committed tokens."""
    grower = _Grower(sources, topology, vocab_size, sampler)
    growing = grower.begin(_not_at_once(sources, trees, topology, vocab_size))
    while growing:
        growing = grower.extend(growing)
    for tree in trees:
        for source in tree.drafting_sources():
            sources[source].finish(tree.request)


def _not_at_once(
    sources: Sequence[DraftModelRunner], trees: Sequence[Tree], topology: TreeTopology, vocab_size: int
) -> list[Tree]:
    """Let the only source draw trees of known shapes in one call; return those that it did not draw."""
    if len(sources) > 1 or not isinstance(topology, StaticTree):
        return list(trees)
    by_chain = {_shaped(plan, topology): tree for tree in trees for plan in tree.plans if plan}
    others = sources[0].model.grow(list(by_chain), sources[0].cache, vocab_size)
    for chain, tree in by_chain.items():
        if chain not in others:
            sources[0].note(tree.request, chain.input_tokens)
            tree.at_once = chain.draft()
    return [by_chain[chain] for chain in others]


def _shaped(plan: Chain, topology: StaticTree) -> Chain:
    """Return a plan of a tree; a greedy request's siblings are the likeliest tokens."""
    if not plan.limit:
        return replace(plan)
    ranked = plan.request.shared_noise and plan.request.params.greedy
    widths = topology.within(plan.limit).widths
    return replace(plan, widths=widths, limit=len(widths) - 1, chance=MostLikely() if ranked else plan.chance)


_Place = tuple[Tree, int]  # a node of a tree; -1 = its root


def first_probs(
    source: DraftModelRunner, plans: Sequence[tuple[Tree, Chain]], vocab_size: int, sampler: Sampler
) -> dict[_Place, Tensor]:
    """Compute the committed tokens; return the distribution [V] below the root of each tree that is drafted."""
    size = source.model.vocab_size
    inputs = [
        SequenceInput(
            plan.request.seq_id,
            known(plan.input_tokens, size),
            DraftTree.empty(),
            hidden=plan.hidden,
            length=plan.request.num_positions,
            source=plan.source,
        )
        for _, plan in plans
    ]
    wanted = [[(tree, -1)] * (plan.limit > 0) for tree, plan in plans]
    probs = next_probs(source, inputs, wanted, vocab_size, sampler)
    for _, plan in plans:
        source.note(plan.request, plan.input_tokens)
    return probs


def next_probs(
    source: DraftModelRunner,
    inputs: Sequence[SequenceInput],
    wanted: Sequence[Sequence[_Place]],
    vocab_size: int,
    sampler: Sampler,
) -> dict[_Place, Tensor]:
    """Run a source's pass; return the distribution [V] after each wanted node: those of each input's last rows."""
    if not inputs:
        return {}
    model, cache = source.model, source.cache
    hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage)
    source.keep(inputs, hidden)
    places, rows, end = list[_Place](), list[int](), 0
    for sequence, nodes_of_sequence in zip(inputs, wanted, strict=True):
        end += len(sequence.tokens) + sequence.tree.size
        rows += range(end - len(nodes_of_sequence), end)
        places += nodes_of_sequence
    if not rows:
        return {}
    logits = fit_vocabulary(model.logits(hidden.last[rows]), vocab_size)
    nodes = [Node(tree.request, tree.path(node), softened=tree.request.shared_noise) for tree, node in places]
    return dict(zip(places, distribution(logits, nodes, sampler), strict=True))


@dataclass(frozen=True)
class _Grower:
    sources: Sequence[DraftModelRunner]
    topology: TreeTopology
    vocab_size: int
    sampler: Sampler

    def begin(self, trees: Sequence[Tree]) -> list[Tree]:
        """Compute the committed tokens and draw the roots' children; return the trees that can grow."""
        by_source = []
        for place, source in enumerate(self.sources):
            plans = [(tree, plan) for tree in trees if (plan := tree.plans[place])]
            by_source.append(first_probs(source, plans, self.vocab_size, self.sampler))
        return self._draw([(tree, -1) for tree in trees if tree.limit], by_source)

    def extend(self, trees: Sequence[Tree]) -> list[Tree]:
        """Compute the trees so far and draw children of their newest level; return the trees that can grow."""
        places = {tree: [(tree, node) for node in range(tree.newest, len(tree.tokens))] for tree in trees}
        by_source = []
        for index, source in enumerate(self.sources):
            drafted = [tree for tree in trees if index in tree.drafting_sources()]
            inputs = [source.tree_input(tree.request, tree.known(source.model.vocab_size)) for tree in drafted]
            wanted = [places[tree] for tree in drafted]
            by_source.append(next_probs(source, inputs, wanted, self.vocab_size, self.sampler))
        return self._draw([each for tree in trees for each in places[tree]], by_source)

    def _draw(self, places: Sequence[_Place], by_source: Sequence[dict[_Place, Tensor]]) -> list[Tree]:
        """Draw the children of nodes; return the trees that can grow."""
        before = {tree: len(tree.tokens) for tree, _ in places}
        for tree, node in places:
            branch(tree, node, [probs.get((tree, node)) for probs in by_source], self.topology, self.sampler)
        for tree, size in before.items():
            tree.newest = size
        return [tree for tree, size in before.items() if size < len(tree.tokens) < tree.limit]


def picker(tree: Tree, depth: int) -> Pick:
    """Return how to draw at a depth: the likeliest token of a greedy request, the position's noise, or a stream."""
    chance = next(plan.chance for plan in tree.plans if plan)
    if tree.request.shared_noise and tree.request.params.greedy:
        return lambda token_probs: int(token_probs.argmax())
    if isinstance(chance, KeyedNoise):
        return lambda token_probs: chance.moved(depth).draw(token_probs)
    return chance.draw


def branch(tree: Tree, node: int, probs: Distributions, topology: TreeTopology, sampler: Sampler = REFERENCE) -> None:
    """Draw the children of a node, -1 = the root, within the tree's limit."""
    state = tree.nodes[node] if node >= 0 else topology.root
    pick, bounded = picker(tree, len(tree.path(node))), topology.within(tree.limit)
    for token, child, own in bounded.children(state, probs, pick, tree.request.shared_noise, sampler):
        if len(tree.tokens) < tree.limit:
            tree.nodes.append(child)
            tree.tokens.append(token)
            tree.parents.append(node)
            tree.probs.append(own)
