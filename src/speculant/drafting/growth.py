"""Grows drafts: one loop over the nodes whose next tokens are drawn next, the frontier.

    distributions   of the next token after each node of the frontier: from a pass of a model, or from a function
    policy          draws the children of these nodes, and names the next frontier

    chain      one token after the other; a guess lets a pass draw several
    tree       the children that a topology names (drafting/topology.py), of one or several models
    dynamic    the most confident nodes of each depth get children, and the most confident nodes of all are the draft
    beams      a beam search that starts from the target's hypotheses

A model's pass computes the newest token of a chain alone, and all nodes of other drafts again; the additional rows cost
little. A native model draws chains and trees in one call (`CausalLM.grow`), with the same result. On row-invariant
kernels a draft does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from speculant.beams import Beams, Hypothesis, Scored, tree_of
from speculant.cache import KVCache
from speculant.drafting.composite import Proposals
from speculant.drafting.topology import Distributions, DynamicTree, Pick, StaticTree, TreeTopology
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, Chain, SequenceInput, build_batch, known
from speculant.sampling import Chances, KeyedNoise, Node, distribution, rank, take_rows, top_tokens
from speculant.tree import tokens_to
from speculant.types import DraftTree, Request

if TYPE_CHECKING:
    from speculant.drafting.model.drafter import DraftModelRunner

Drafting = Sequence[tuple[Request, int]]  # requests with their limits
NextProbs = Callable[[Sequence[Node]], Tensor]  # nodes -> the distribution [r, V] in float64 of each one's next token
# For each chain, a tree of tokens that it may draw next, of fewer nodes than it has tokens to draw.
Guess = Callable[[Sequence[Chain]], Sequence[DraftTree]]


class Growth(ABC):
    """A sequence's draft while it grows. A subclass is a policy.

    plans: the input tokens and the limit of each of the models `sources`; None = the model takes no part. frontier: the
    nodes whose next tokens are drawn next, -1 = the root. carried [1 + n, hidden]: the states that the root and each
    node of the last pass hand on, if the model hands on any.
    """

    def __init__(self, plans: Sequence[Chain | None], sources: Sequence[DraftModelRunner] = ()) -> None:
        self.plans, self.sources = plans, sources
        self.chain = next(plan for plan in plans if plan)
        self.request, self.carried, self.begun = self.chain.request, None, False
        self.limit = min((plan.limit for plan in plans if plan and plan.limit), default=0)
        self.tokens, self.parents = list[int](), list[int]()
        self.frontier = [-1] if self.limit else []

    carried: Tensor | None

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node; empty for the root."""
        return tokens_to(node, self.tokens, self.parents)

    def nodes(self) -> list[Node]:
        """Return the nodes of the frontier; distributions of greedy requests with shared noise rank their tokens."""
        return [Node(self.request, self.path(node), self.request.drafts.shared_noise) for node in self.frontier]

    def rows(self) -> Iterable[int]:
        """Return the rows of these nodes in the pass; 0 = the root's."""
        return [1 + node for node in self.frontier]

    def computed_tree(self) -> DraftTree:
        """Return the nodes that the next pass computes below the root."""
        return DraftTree.of(self.tokens, self.parents)

    def input(self, place: int, vocab_size: int) -> SequenceInput | None:
        """Return the input of a source of `vocab_size` tokens in the next pass; None = it takes no part."""
        plan = self.plans[place]
        if plan is None or (self.begun and not plan.limit):
            return None
        if self.begun:
            return self.sources[place].tree_input(self.request, self.computed_tree(), self.carried)
        return chain_input(plan, plan.input_tokens, vocab_size, self.computed_tree(), plan.hidden)

    def computed(self, place: int, carried: Tensor | None) -> None:
        """Record that a source's pass is done."""
        self.carried = carried
        if not self.begun and (plan := self.plans[place]):
            self.sources[place].note(self.request, plan.input_tokens)

    @abstractmethod
    def advance(self, probs: Distributions) -> None:
        """Draw the children of the frontier's nodes and set the next frontier.

        probs: by source, the distributions [nodes, V] of the next tokens; None = the source draws nothing.
        """


def grow(growing: Sequence[Growth], distributions: Callable[[Sequence[Growth]], Sequence[Distributions]]) -> None:
    """Grow drafts until their frontiers are empty. The first round takes in drafts that only catch up too."""
    while growing:
        for each, probs in zip(growing, distributions(growing), strict=True):
            if each.frontier:
                each.advance(probs)
            each.begun = True
        growing = [each for each in growing if each.frontier]


def chain_input(
    chain: Chain, tokens: Sequence[int], vocab_size: int, tree: DraftTree, hidden: Tensor | None
) -> SequenceInput:
    """Return the input of tokens and a tree after them, in a chain's sequence, for a model of `vocab_size` tokens."""
    own, length = known(tokens, vocab_size), chain.request.num_positions
    certain = chain.certain if tokens is chain.input_tokens else 0
    return SequenceInput(
        chain.request.seq_id, own, known_tree(tree, vocab_size), hidden=hidden, length=length, source=chain.source,
        certain=certain,
    )  # fmt: skip


def known_tree(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return a tree as a model of `vocab_size` tokens can read it: see `known`."""
    if not tree.size or max(tree.token_list) < vocab_size:
        return tree
    return DraftTree.of(known(tree.token_list, vocab_size), tree.parent_list)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits [r, v] to [r, vocab_size]; padding is impossible to draw."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


@dataclass(frozen=True)
class Passes:
    """Distributions over `vocab_size` tokens, from passes of models on their caches. prepare: comes before a pass."""

    models: Sequence[tuple[CausalLM, KVCache]]
    vocab_size: int
    sampler: Sampler = REFERENCE
    prepare: Callable[[Sequence[Growth]], None] | None = None

    @classmethod
    def of(cls, sources: Sequence[DraftModelRunner], vocab_size: int, sampler: Sampler) -> Passes:
        """Return the passes of runners."""
        return cls([(source.model, source.cache) for source in sources], vocab_size, sampler)

    def __call__(self, growing: Sequence[Growth]) -> list[Distributions]:
        """Run a pass of each model over all drafts; see `Growth.advance`."""
        if self.prepare is not None:
            self.prepare(growing)
        by_source = [self._run(place, growing) for place in range(len(self.models))]
        return [[own.get(each) for own in by_source] for each in growing]

    def _run(self, place: int, growing: Sequence[Growth]) -> dict[Growth, Tensor]:
        model, cache = self.models[place]
        own = [(each, found) for each in growing if (found := each.input(place, model.vocab_size)) is not None]
        if not own:
            return {}
        inputs = [found for _, found in own]
        hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage)
        rows, nodes, counts, end = list[int](), list[Node](), dict[Growth, int](), 0
        for each, found in own:
            root, end = end + len(found.tokens) - 1, end + len(found.tokens) + found.tree.size
            each.computed(place, None if hidden.carried is None else hidden.carried[root:end])
            if (plan := each.plans[place]) and plan.limit:
                rows += [root + row for row in each.rows()]
                counts[each] = len(rows) - len(nodes)
                nodes += each.nodes()
        if not rows:
            return {}
        logits = fit_vocabulary(model.logits(hidden.last[rows]), self.vocab_size)
        probs = torch.split(distribution(logits, nodes, self.sampler), list(counts.values()))
        return dict(zip(counts, probs, strict=True))


def from_function(next_probs: NextProbs) -> Callable[[Sequence[Growth]], list[Distributions]]:
    """Return distributions that a function makes, all drafts in one call."""

    def distributions(growing: Sequence[Growth]) -> list[Distributions]:
        own = [each.nodes() for each in growing]
        probs = next_probs([node for nodes in own for node in nodes])
        return [[each] for each in torch.split(probs, [len(nodes) for nodes in own])]

    return distributions


class ChainGrowth(Growth):
    """A chain, of which a pass computes the newest token and a guess of the next ones.

    A token that was guessed needs no pass of its own (arXiv 2211.17192, section 6): its row is the guess's row. The
    rest of the guess leaves the cache. Every token is drawn by the chain's own chance from the model's distribution.
    See `Chain` for a chain's ends.
    """

    guess = DraftTree.empty()

    def __init__(self, chain: Chain, cache: KVCache | None = None) -> None:
        super().__init__([chain])
        self._cache = cache

    @override
    def nodes(self) -> list[Node]:
        chain, guess = self.chain, self.guess
        return [
            Node(chain.request, [*chain.tokens, *guess.tokens_to(node)], chain.softened)
            for node in range(-1, guess.size)
        ]

    @override
    def rows(self) -> Iterable[int]:
        return range(1 + self.guess.size)

    @override
    def input(self, place: int, vocab_size: int) -> SequenceInput:
        if not self.begun:
            return chain_input(self.chain, self.chain.input_tokens, vocab_size, self.guess, self.chain.hidden)
        states = None if self.carried is None else self.carried[:1]
        return chain_input(self.chain, self.chain.tokens[-1:], vocab_size, self.guess, states)

    @override
    def computed(self, place: int, carried: Tensor | None) -> None:
        self.carried = carried

    @override
    def advance(self, probs: Distributions) -> None:
        (own,), chain, guess = probs, self.chain, self.guess
        assert own is not None
        path, goes_on = draw_along(chain, guess, own, own.sum(-1).tolist())
        if path and chain.emits_probs:
            drawn = own[[1 + node for node in path]]
            chain.probs = drawn if chain.probs is None else torch.cat([chain.probs, drawn])
        if guess.size and self._cache is not None:
            seq_id = chain.request.seq_id
            self._cache.compact(seq_id, self._cache.length(seq_id) - guess.size, path[1:])
        self.frontier = [-1] if goes_on else []


def draw_along(chain: Chain, tree: DraftTree, probs: Tensor, totals: Sequence[float]) -> tuple[list[int], bool]:
    """Draw a chain's tokens after the root of a guess and after each node that is drawn.

    probs [n + 1, V] and their sums `totals` are those after the root and after each node. Returns the nodes after which
    a token was drawn, -1 = the root, and whether the chain goes on: see `Chain` for its ends.
    """
    path, node = list[int](), -1
    while 0 < totals[1 + node] < math.inf:
        own, scores = probs[1 + node], None
        if chain.stop_path:
            scores = chain.chance.scores(own) if isinstance(chain.chance, KeyedNoise) else own
        token = chain.chance.draw(own)
        chain.tokens = [*chain.tokens, token]
        path.append(node)
        chain.confidence *= 1.0 if scores is None else float(scores[token])
        is_unlikely = chain.confidence < chain.stop_path or (chain.stop_below and float(own[token]) < chain.stop_below)
        if len(chain.tokens) == chain.limit or is_unlikely:
            return path, False
        child = tree.child(node, token)
        if child is None:
            return path, True
        node = child
    return path, False


def grow_chains(
    model: CausalLM, chains: Sequence[Chain], cache: KVCache, vocab_size: int, sampler: Sampler = REFERENCE
) -> None:
    """Draw every chain's tokens, over a vocabulary of `vocab_size`; the cache must have room for all.

    A native model draws a chain in one call; other chains are drawn pass by pass.
    """
    if others := model.grow(chains, cache, vocab_size):
        grow_by_passes(model, others, cache, vocab_size, sampler)


def grow_by_passes(
    model: CausalLM,
    chains: Sequence[Chain],
    cache: KVCache,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
    guess: Guess | None = None,
) -> None:
    """Draw every chain's tokens, a pass for each token or for each guess."""

    def prepare(growing: Sequence[Growth]) -> None:
        for each, tree in zip(growing, guess([each.chain for each in growing]) if guess else (), strict=True):
            assert isinstance(each, ChainGrowth)
            each.guess = tree

    passes = Passes([(model, cache)], vocab_size, sampler, prepare if guess else None)
    grow([ChainGrowth(chain, cache) for chain in chains], passes)


def new_chains(drafting: Iterable[tuple[Request, int]], chances: Chances) -> list[Chain]:
    """Return a chain to draw for each pair (request, limit), with the request's draft chance as a draft model has."""
    return [Chain(request, [], limit, chances.draft(request)) for request, limit in drafting]


def draw_chains(chains: Sequence[Chain], next_probs: NextProbs) -> list[DraftTree]:
    """Draw the tokens of chains from a function's distributions, all level by level; return their drafts.

    Each has the rows that it was drawn from as `probs` where a ratio rule verifies.
    """
    grow([ChainGrowth(chain) for chain in chains if chain.limit], from_function(next_probs))
    return [chain.draft() for chain in chains]


class TreeGrowth(Growth):
    """A tree of a topology, drawn level by level by the chance of its sequence."""

    def __init__(
        self,
        plans: Sequence[Chain | None],
        topology: TreeTopology,
        sources: Sequence[DraftModelRunner] = (),
        sampler: Sampler = REFERENCE,
    ) -> None:
        super().__init__(plans, sources)
        self._topology, self._sampler = topology.within(self.limit), sampler
        self._states, self._probs = dict[int, Any]({-1: topology.root}), list[Tensor]()

    @override
    def advance(self, probs: Distributions) -> None:
        first = len(self.tokens)
        for place, node in enumerate(self.frontier):
            self._branch(node, [None if own is None else own[place] for own in probs])
        full, depth = len(self.tokens) >= self.limit, self._topology.depth
        new = () if full else range(first, len(self.tokens))
        self.frontier = [node for node in new if len(self.path(node)) < depth]

    def _branch(self, node: int, probs: Distributions) -> None:
        """Draw the children of a node, within the limit. A node without a possible token has none."""
        pick, shared = self._picker(len(self.path(node))), self.request.drafts.shared_noise
        for token, state, own in self._topology.children(self._states[node], probs, pick, shared, self._sampler):
            if len(self.tokens) < self.limit:
                self._states[len(self.tokens)] = state
                self.tokens.append(token)
                self.parents.append(node)
                self._probs.append(own)

    def _picker(self, depth: int) -> Pick:
        """Return how to draw at a depth: the likeliest token of a greedy request, the position's noise, or a stream."""
        chance = self.chain.chance
        if self.request.drafts.shared_noise and self.request.params.greedy:
            return lambda token_probs: int(token_probs.argmax())
        if isinstance(chance, KeyedNoise):
            return lambda token_probs: chance.moved(depth).draw(token_probs)
        return chance.draw

    def draft(self) -> DraftTree:
        """Return the tree, with probs where a ratio rule may need them."""
        if not self.tokens:
            return DraftTree.empty()
        probs = None if self.request.drafts.shared_noise else torch.stack(self._probs)
        return DraftTree.of(self.tokens, self.parents, probs)


def grow_trees(
    sources: Sequence[DraftModelRunner],
    drafting: Drafting,
    topology: TreeTopology,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
) -> Proposals:
    """Draw trees for pairs (request, wanted nodes) with several models; their caches then hold no drafted tokens."""
    plans: dict[int, list[Chain | None]] = {request.seq_id: [None] * len(sources) for request, _ in drafting}
    for place, source in enumerate(sources):
        for plan in source.plan(drafting):
            plans[plan.request.seq_id][place] = plan
    trees = [TreeGrowth(own, topology, sources, sampler) for own in plans.values() if any(own)]
    grow(trees, Passes.of(sources, vocab_size, sampler))
    for tree in trees:
        for source, own in zip(sources, tree.plans, strict=True):
            if own and own.limit:
                source.finish(tree.request)
    return {tree.request.seq_id: tree.draft() for tree in trees if tree.tokens}


def draw_trees(chains: Sequence[Chain], topology: TreeTopology, next_probs: NextProbs) -> list[DraftTree]:
    """Draw a tree of a topology for each of these by its chance, from a function's distributions, level by level."""
    trees = [TreeGrowth([chain], topology) for chain in chains]
    grow([tree for tree in trees if tree.limit], from_function(next_probs))
    return [tree.draft() for tree in trees]


class DynamicGrowth(Growth):
    """A tree of the most confident nodes (EAGLE-2, arXiv 2406.16858).

        expand   the `topk` most confident nodes of each depth, the inner ones, get `topk` children each
        rerank   the most confident nodes of all depths are the draft, the most confident first

    A node's score estimates the probability that it is accepted if its parent is. Its confidence is the product of the
    scores from the root to it. The score for a greedy request is the draft's probability at temperature 1. For a seeded
    request it also depends on the noise, which draft and target share (`KeyedNoise.scores`).

    The shape depends on the tokens. That would bias ratio rules, so only requests with shared noise, greedy ones
    included, get such trees.
    """

    def __init__(self, chain: Chain, source: DraftModelRunner) -> None:
        super().__init__([chain], [source])
        self._scores, self._confidences, self._inner = list[float](), list[float](), list[int]()

    @override
    def computed_tree(self) -> DraftTree:
        """Return the inner nodes."""
        return super().computed_tree().only(self._inner)

    @override
    def rows(self) -> Iterable[int]:
        end = 1 + len(self._inner)
        return range(end - len(self.frontier), end)

    @override
    def advance(self, probs: Distributions) -> None:
        (own,), first, chain = probs, len(self.tokens), self.chain
        assert own is not None
        for node, token_probs in zip(self.frontier, own, strict=True):
            self._add_children(node, token_probs)
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self._confidences[node])[: chain.topk]
        deeper = bool(new) and len(self.path(new[0])) * chain.topk <= chain.num_inner
        self.frontier = new if deeper else []
        self._inner += self.frontier
        chain.tokens, chain.parents, chain.scores = self.tokens, self.parents, self._scores

    def _add_children(self, node: int, probs: Tensor) -> None:
        scores, topk = probs, self.chain.topk
        if isinstance(self.chain.chance, KeyedNoise):
            scores = self.chain.chance.moved(len(self.path(node))).scores(probs)
        best, tokens = scores.sort(descending=True, stable=True)
        for score, token in zip(best[:topk].tolist(), tokens[:topk].tolist(), strict=True):
            if score > 0:
                self.tokens.append(token)
                self.parents.append(node)
                self._scores.append(score)
                self._confidences.append(score * (1.0 if node < 0 else self._confidences[node]))


def rerank(chain: Chain, count: int) -> DraftTree:
    """Return the `count` nodes with the highest confidence, the best first; a parent comes before its children."""
    assert chain.parents is not None
    assert chain.scores is not None
    scores, confidences = [min(1.0, score) for score in chain.scores], list[float]()
    for parent, score in zip(chain.parents, scores, strict=True):
        confidences.append(score * (1.0 if parent < 0 else confidences[parent]))
    kept = sorted(range(len(confidences)), key=lambda node: -confidences[node])[:count]
    return DraftTree.of(chain.tokens, chain.parents, scores=scores).only(kept)


def draft_shaped(
    source: DraftModelRunner,
    drafting: Drafting,
    topology: StaticTree | DynamicTree,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
) -> Proposals:
    """Draft trees for pairs (request, most nodes) with one model; its cache then holds committed tokens alone."""
    wanted = {request.seq_id: limit for request, limit in drafting}
    if isinstance(topology, DynamicTree):  # another's cache has room for the draft alone
        room = 1 + (topology.depth - 1) * topology.topk
        drafting = [(request, room if source.owns_cache else min(room, limit)) for request, limit in drafting]
    chains = [_shaped(plan, topology, wanted[plan.request.seq_id]) for plan in source.plan(drafting)]
    others = source.model.grow(chains, source.cache, vocab_size)
    growing: dict[Chain, Growth] = {
        chain: DynamicGrowth(chain, source)
        if isinstance(topology, DynamicTree)
        else TreeGrowth([chain], topology, [source], sampler)
        for chain in others
    }
    grow([*growing.values()], Passes.of([source], vocab_size, sampler))
    drafts = Proposals()
    for chain in chains:
        seq_id, own = chain.request.seq_id, growing.get(chain)
        if own is None:
            source.note(chain.request, chain.input_tokens)
        if chain.limit:
            source.finish(chain.request)
            draft = own.draft() if isinstance(own, TreeGrowth) else chain.draft()
            if draft.size:
                drafts[seq_id] = rerank(chain, wanted[seq_id]) if chain.topk else draft
    return drafts


def _shaped(plan: Chain, topology: StaticTree | DynamicTree, wanted: int) -> Chain:
    """Return a plan of a tree.

    A dynamic tree is as deep as its draft of `wanted` nodes may be and its cache has room for.
    """
    if not plan.limit:
        return replace(plan)
    if isinstance(topology, DynamicTree):
        topk = topology.topk
        depth = min(topology.depth, wanted, 1 + (plan.limit - 1) // topk)
        return replace(plan, topk=topk, limit=topk + (depth - 1) * topk**2, stop_path=0.0)
    widths = topology.within(plan.limit).widths
    return replace(plan, widths=widths, limit=len(widths) - 1, stop_path=0.0)


class BeamGrowth(Growth):
    """A beam search with a draft model, from the target's live hypotheses and their scores (arXiv:2211.17192, A.4).

    The live hypotheses and their drafted continuations form one tree of at most `limit` nodes; its beam is
    `nodes_per_beam` times as wide as the target's.
    """

    def __init__(self, plan: Chain, source: DraftModelRunner, beams: Beams, nodes_per_beam: int) -> None:
        super().__init__([plan], [source])
        width = nodes_per_beam * beams.width
        self._texts: dict[Hypothesis, int] = {text: node for node, text in enumerate(beams.live_texts)}
        self._beams, self._rounds = replace(beams, width=width), -(-(plan.limit - len(self._texts)) // width)
        self._look()
        self.drafts = bool(self.frontier)

    def tree(self) -> DraftTree:
        """Return the target's live hypotheses, then the drafted ones."""
        return tree_of(self._texts)

    def _look(self) -> None:
        """Set the frontier: the hypotheses that are not scored yet, if another round could add nodes."""
        grows = self._rounds > 0 and bool(self._beams.live) and len(self._texts) < self.limit
        self.frontier = [self._texts.get(each, -1) for each in self._beams.unscored] if grows else []

    @override
    def computed_tree(self) -> DraftTree:
        return self.tree() if self.frontier else DraftTree.empty()

    @override
    def nodes(self) -> list[Node]:
        tree = self.tree()
        return [Node(self.request, tree.tokens_to(tip)) for tip in self.frontier]

    @override
    def advance(self, probs: Distributions) -> None:
        """Take a round; hypotheses that the tree has no room for are dropped."""
        (own,) = probs
        assert own is not None
        best = rank(own, self._beams.width, self._beams.end_token_ids)
        ranked = [Scored(continuations) for continuations in best]
        beams = self._beams.advance(dict(zip(self._beams.unscored, ranked, strict=True)))
        self._beams = replace(beams, live=beams.live[: self.limit - len(self._texts)])
        self._texts |= {each: node for node, each in enumerate(self._beams.live, len(self._texts))}
        self._rounds -= 1
        self._look()


def draft_beams(
    source: DraftModelRunner, drafting: Drafting, nodes_per_beam: int, vocab_size: int, sampler: Sampler = REFERENCE
) -> Proposals:
    """Return the trees of the searches' live hypotheses and drafted nodes; drafting has their limits.

    A request with a backlog, or without room in the runner's cache, only catches up.
    """
    states = {request.seq_id: request.search.beams for request, _ in drafting if request.search is not None}
    wanted = [(request, states[request.seq_id].live_tree.size + limit) for request, limit in drafting]
    planned = source.plan(wanted)
    searches = [BeamGrowth(plan, source, states[plan.request.seq_id], nodes_per_beam) for plan in planned]
    drafted, started = [search for search in searches if search.drafts], time.perf_counter()
    grow(searches, Passes.of([source], vocab_size, sampler))
    for search in drafted:
        source.finish(search.request)
    if drafted:
        node_s = (time.perf_counter() - started) / max(1, sum(limit for _, limit in drafting))
        for search in drafted:
            search.request.work.drafts.follow(node_s)
    return {search.request.seq_id: search.tree() for search in drafted}


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
