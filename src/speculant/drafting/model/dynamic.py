"""Trees of the most confident nodes (EAGLE-2, arXiv 2406.16858), in one native call or depth by depth.

    expand   the `topk` most confident nodes of each depth get `topk` children each
    rerank   the most confident nodes of all depths are the draft, the most confident first

A node's score estimates the probability that it is accepted if its parent is. Its confidence is the product of the
scores from the root to it. The score for a greedy request is the draft's probability at temperature 1. For a seeded
request it also depends on the noise, which draft and target share (`KeyedNoise.scores`).

The shape depends on the tokens. That would bias ratio rules, so only requests with shared noise, greedy ones included,
get such trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from speculant.drafting.guard import Proposals
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.model.trees import Tree, first_probs, next_probs
from speculant.drafting.topology import DynamicTree
from speculant.kernels import Sampler
from speculant.models import Chain, known
from speculant.sampling import KeyedNoise, MostLikely
from speculant.types import DraftTree, Request


@dataclass(eq=False)
class _Expanded(Tree):
    """A tree of all nodes drawn so far. inner: those that have children. newest_inner: those of the last depth."""

    scores: list[float] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    newest_inner: list[int] = field(default_factory=lambda: [-1])

    @property
    def plan(self) -> Chain:
        """The only plan."""
        assert self.plans[0] is not None
        return self.plans[0]

    def known(self, vocab_size: int) -> DraftTree:
        """Return the inner nodes, for a model of `vocab_size` tokens."""
        places = {node: place for place, node in enumerate((-1, *self.inner), -1)}
        tokens = [self.tokens[node] for node in self.inner]
        return DraftTree.of(known(tokens, vocab_size), [places[self.parents[node]] for node in self.inner])

    def expand(self, probs: Sequence[Tensor]) -> None:
        """Draw the children of the newest inner nodes, and choose the next ones."""
        first, plan = len(self.tokens), self.plan
        for node, token_probs in zip(self.newest_inner, probs, strict=True):
            self._add_children(node, token_probs)
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.confidences[node])[: plan.topk]
        deeper = bool(new) and len(self.path(new[0])) * plan.topk <= plan.num_inner
        self.newest_inner = new if deeper else []
        self.inner += self.newest_inner

    def _add_children(self, node: int, probs: Tensor) -> None:
        scores = probs
        if isinstance(self.plan.chance, KeyedNoise):
            scores = self.plan.chance.moved(len(self.path(node))).scores(probs)
        best, tokens = scores.sort(descending=True, stable=True)
        for score, token in zip(best[: self.plan.topk].tolist(), tokens[: self.plan.topk].tolist(), strict=True):
            if score > 0:
                self.tokens.append(token)
                self.parents.append(node)
                self.scores.append(score)
                self.confidences.append(score * (1.0 if node < 0 else self.confidences[node]))


def grow_dynamic(
    source: DraftModelRunner,
    drafting: Sequence[tuple[Request, int]],
    topology: DynamicTree,
    vocab_size: int,
    sampler: Sampler,
) -> Proposals:
    """Draft for pairs (request, most nodes of its draft); afterwards the cache holds only committed tokens."""
    wanted, room = {request.seq_id: limit for request, limit in drafting}, 1 + (topology.depth - 1) * topology.topk
    planned = source.plan(
        [
            (request, room if source.owns_cache else min(room, limit))  # another's cache has room for the draft alone
            for request, limit in drafting
        ]
    )
    chains = [_shaped(plan, topology, wanted) for plan in planned]
    others = source.model.grow(chains, source.cache, vocab_size)
    for chain in chains:
        if chain not in others:
            source.note(chain.request, chain.input_tokens)
    _grow_by_depth(source, [_Expanded(chain.request, [chain]) for chain in others], vocab_size, sampler)
    for chain in chains:
        if chain.limit:
            source.finish(chain.request)
    return {chain.request.seq_id: rerank(chain, wanted[chain.request.seq_id]) for chain in chains if chain.tokens}


def _shaped(plan: Chain, topology: DynamicTree, wanted: dict[int, int]) -> Chain:
    """Return a plan of a tree as deep as its draft may be and its cache has room for."""
    if not plan.limit:
        return replace(plan)
    topk = topology.topk
    depth = min(topology.depth, wanted[plan.request.seq_id], 1 + (plan.limit - 1) // topk)
    chance = MostLikely() if plan.request.params.greedy else plan.chance
    return replace(plan, topk=topk, limit=topk + (depth - 1) * topk**2, chance=chance)


def _grow_by_depth(source: DraftModelRunner, trees: Sequence[_Expanded], vocab_size: int, sampler: Sampler) -> None:
    """Draw all nodes; `CausalLM.grow` must give the same result."""
    probs = first_probs(source, [(tree, tree.plan) for tree in trees], vocab_size, sampler)
    growing = [tree for tree in trees if tree.plan.limit]
    while growing:
        for tree in growing:
            tree.expand([probs[tree, node] for node in tree.newest_inner])
        growing = [tree for tree in growing if tree.newest_inner]
        inputs = [source.tree_input(tree.request, tree.known(source.model.vocab_size)) for tree in growing]
        places = [[(tree, node) for node in tree.newest_inner] for tree in growing]
        probs = next_probs(source, inputs, places, vocab_size, sampler)
    for tree in trees:
        tree.plan.tokens, tree.plan.parents, tree.plan.scores = tree.tokens, tree.parents, tree.scores


def rerank(chain: Chain, count: int) -> DraftTree:
    """Return the `count` nodes with the highest confidence, the best first; a parent comes before its children."""
    assert chain.parents is not None
    assert chain.scores is not None
    confidences = list[float]()
    for parent, score in zip(chain.parents, chain.scores, strict=True):
        confidences.append(min(1.0, score) * (1.0 if parent < 0 else confidences[parent]))
    kept = sorted(range(len(confidences)), key=lambda node: -confidences[node])[:count]
    places = {node: place for place, node in enumerate((-1, *kept), -1)}
    return DraftTree.of(
        [chain.tokens[node] for node in kept],
        [places[chain.parents[node]] for node in kept],
        scores=[min(1.0, chain.scores[node]) for node in kept],
    )
