"""A draft model, its KV cache, and the chains of tokens that it draws, many sequences in one batch.

The cache holds committed tokens, and possibly drafts of the last round. The next round rolls back the
drafts that were rejected and computes the tokens that are missing:

    cached     p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; y is the next input

The tokens are those that the model reads: a model of another tokenizer reads a text as other tokens
(models/vocabulary.py), and more of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from speculant.cache.paged import KVCache, ReservationPlan
from speculant.cache.sources import Source
from speculant.drafting.base import DrafterContext
from speculant.drafting.model.sources import DraftSources
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM, Chain, Hidden, SequenceInput, build_batch, known
from speculant.models.vocabulary import MappedVocabulary
from speculant.sampling.chance import Chances, MostLikely
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree, Request

# A chain, its next input tokens, and the hidden states that they take in, if the model takes in any.
Growing = tuple[Chain, list[int], Tensor | None]
# For each chain, a tree of tokens that it may draw next, of fewer nodes than it has tokens to draw.
Guess = Callable[[Sequence[Chain]], Sequence[DraftTree]]


def guess_nothing(chains: Sequence[Chain]) -> list[DraftTree]:
    """Return empty trees: every pass draws one token."""
    return [DraftTree.empty()] * len(chains)


def grow(
    model: CausalLM,
    chains: Sequence[Chain],
    cache: KVCache,
    vocab_size: int,
    sampler: Sampler = REFERENCE,
    guess: Guess | None = None,
) -> None:
    """Draw every chain's tokens, over a vocabulary of `vocab_size`; the cache must have room for all.

    A native model draws a chain in one call, without guesses; other chains are drawn pass by pass.

    On row-invariant kernels a chain's tokens and distributions do not depend on the rest of the batch, nor on `guess`:
    each pass computes the rows of a guess too, and a token that was guessed needs no pass of its own (arXiv 2211.17192,
    section 6). Every token is drawn by the chain's own chance from the model's own distribution.
    """
    others = chains if guess else model.grow(chains, cache, vocab_size)
    if others:
        stepwise = _Stepwise(model, cache, vocab_size, sampler, guess or guess_nothing)
        stepwise.grow([(chain, chain.input_tokens, chain.hidden) for chain in others])


@dataclass(frozen=True)
class _Stepwise:
    """Passes that draw at least one token for each chain; `CausalLM.grow` must give the same result."""

    model: CausalLM
    cache: KVCache
    vocab_size: int
    sampler: Sampler
    guess: Guess

    def grow(self, growing: list[Growing]) -> None:
        """Draw until every chain is complete."""
        while growing:
            growing = self._step(growing)

    def _step(self, growing: Sequence[Growing]) -> list[Growing]:
        """Run a pass over the chains' input tokens and guesses; return the next pass's chains."""
        trees, size = self.guess([chain for chain, _, _ in growing]), self.model.vocab_size
        inputs, drawing, rows, end = list[SequenceInput](), list[tuple[Chain, DraftTree]](), list[int](), 0
        roots = dict[Chain, int]()
        for (chain, tokens, states), tree in zip(growing, trees, strict=True):
            inputs.append(
                SequenceInput(
                    chain.request.seq_id,
                    known(tokens, size),
                    _known_tree(tree, size),
                    hidden=states,
                    length=chain.request.num_positions,
                    source=chain.source,
                )
            )
            root, end = end + len(tokens) - 1, end + len(tokens) + tree.size
            roots[chain] = root
            if chain.limit:
                drawing.append((chain, tree))
                rows += range(root, end)
        batch = build_batch(inputs, self.cache, self.model.cache_shape.device)
        hidden = self.model.forward(batch, self.cache.storage)
        drawn = self._draw(drawing, hidden.last[rows]) if drawing else []
        return [(chain, chain.tokens[-1:], _carried(hidden, roots[chain])) for chain in drawn]

    def _draw(self, drawing: Sequence[tuple[Chain, DraftTree]], hidden: Tensor) -> list[Chain]:
        """Draw along the guesses, drop the rest of them from the cache and return the chains that go on.

        hidden has the rows of each guess's root and nodes.
        """
        logits = fit_vocabulary(self.model.logits(hidden), self.vocab_size)
        nodes = [
            Node(chain.request, [*chain.tokens, *tree.tokens_to(node)], chain.softened)
            for chain, tree in drawing
            for node in range(-1, tree.size)
        ]
        probs = distribution(logits, nodes, self.sampler)
        totals, unfinished, first = probs.sum(-1).tolist(), list[Chain](), 0
        for chain, tree in drawing:
            end = first + 1 + tree.size
            path, goes_on = draw_along(chain, tree, probs[first:end], totals[first:end])
            if path and chain.emits_probs:
                drawn = probs[[first + 1 + node for node in path]]
                chain.probs = drawn if chain.probs is None else torch.cat([chain.probs, drawn])
            if tree.size:
                seq_id = chain.request.seq_id
                self.cache.compact(seq_id, self.cache.length(seq_id) - tree.size, path[1:])
            if goes_on:
                unfinished.append(chain)
            first = end
        return unfinished


def draw_along(chain: Chain, tree: DraftTree, probs: Tensor, totals: Sequence[float]) -> tuple[list[int], bool]:
    """Draw a chain's tokens after the root of a guess and after each node that is drawn.

    probs [n + 1, V] and their sums `totals` are those after the root and after each node. Returns the nodes after which
    a token was drawn, -1 = the root, and whether the chain goes on: see `Chain` for its ends.
    """
    path, node = list[int](), -1
    while 0 < totals[1 + node] < math.inf:
        token = chain.chance.draw(probs[1 + node])
        chain.tokens = [*chain.tokens, token]
        path.append(node)
        if len(chain.tokens) == chain.limit or (chain.stop_below and float(probs[1 + node, token]) < chain.stop_below):
            return path, False
        child = tree.child(node, token)
        if child is None:
            return path, True
        node = child
    return path, False


def _carried(hidden: Hidden, row: int) -> Tensor | None:
    return None if hidden.carried is None else hidden.carried[row : row + 1]


def _known_tree(tree: DraftTree, vocab_size: int) -> DraftTree:
    """Return a tree as a model of `vocab_size` tokens can read it: see `known`."""
    tokens = known(tree.token_list, vocab_size)
    return tree if tokens == tree.token_list else DraftTree.of(tokens, tree.parent_list)


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits [r, v] to [r, vocab_size]; padding is impossible to draw."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


@dataclass
class _CachedTokens:
    """The tokens in one sequence's cache; the first `agreed` are known to be committed. salt: see `ModelNeeds.salt`.

    text: what the first `num_read` committed tokens are read as, for a model of another tokenizer.

    Tokens at the end of a request that are drafted (`Request.num_drafted`) may be in `tokens`. They are not agreed, nor
    part of `text`.
    """

    tokens: list[int] = field(default_factory=list)
    agreed: int = 0
    salt: str = ""
    text: list[int] = field(default_factory=list)
    num_read: int = 0


class DraftModelRunner:
    """A draft model with a KV cache of its own.

    The cache may lack a request's newest tokens: its backlog. A backlog over max_num_batched_tokens takes several
    rounds, without drafting. stop_below: see `Chain`. vocabulary: of a model with another tokenizer; None = it reads
    the target's tokens.
    """

    owns_cache = True
    vocabulary: MappedVocabulary | None = None

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache | None,
        chances: Chances,
        max_num_batched_tokens: int,
        stop_below: float = 0.0,
    ) -> None:
        self.model, self._cache, self._stop_below = model, cache, stop_below
        self._chances, self._budget = chances, max_num_batched_tokens
        self._cached: dict[int, _CachedTokens] = {}

    @cached_property
    def cache(self) -> KVCache:
        """The cache of the model's keys and values."""
        assert self._cache is not None, "a runner without a cache of its own names another one"
        return self._cache

    @cached_property
    def sources(self) -> DraftSources:
        """The encoded sources of its texts; none if the model has no encoder."""
        return DraftSources(self.model, self.cache)

    @classmethod
    def of(cls, context: DrafterContext, model: CausalLM, **own: Any) -> Self:
        """Return the runner of a model, with a cache of its own; own: further arguments of a subclass."""
        cache = context.make_cache(model.cache_shape)
        made = cls(model, cache, context.chances, context.max_num_batched_tokens, context.stop_below, **own)
        made.vocabulary = context.vocabulary_of(model)
        return made

    def begin(self, request: Request) -> None:
        """Start a new sequence; nothing is computed before the first draft (docs/references.md, lazy prefill)."""
        self._cached[request.seq_id] = _CachedTokens()

    def end(self, request: Request) -> None:
        """Forget a sequence, and release its blocks and its source."""
        self._cached.pop(request.seq_id, None)
        self.cache.release(request.seq_id)
        self.sources.release(request)

    def text(self, request: Request) -> list[int]:
        """Return a request's tokens as the model reads them, at least as many."""
        if self.vocabulary is None:
            return request.tokens
        committed, drafted = self.committed(request), request.num_drafted
        return [*committed, *self.vocabulary.read(request.tokens[-drafted:])] if drafted else committed

    def committed(self, request: Request) -> list[int]:
        """Return the part of `text` that is committed; it only grows while the request runs."""
        own = request.tokens[: -request.num_drafted] if request.num_drafted else request.tokens
        if self.vocabulary is None:
            return own
        cached = self._cached[request.seq_id]
        if cached.num_read < len(own):
            if not cached.num_read:
                cached.text = self.vocabulary.begin(own)
            cached.text += self.vocabulary.read(own[cached.num_read :])
            cached.num_read = len(own)
        return cached.text

    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """Record tokens that a pass has added to the cache."""
        self._cached[request.seq_id].tokens += tokens

    def finish(self, request: Request) -> None:
        """Drop the drafted tokens from a sequence's cache."""
        self.cache.truncate_to(request.seq_id, len(self.text(request)))

    def root(self, request: Request) -> list[int]:
        """Return the input token of a draft's root, after dropping it and what follows from the cache."""
        text = self.text(request)
        self.cache.truncate_to(request.seq_id, len(text) - 1)
        return text[-1:]

    def tree_input(self, request: Request, tree: DraftTree) -> SequenceInput:
        """Return the input of a root and the tree below it, after dropping them from the cache."""
        tokens = known(self.root(request), self.model.vocab_size)
        source = self.sources.id_of(request)
        return SequenceInput(request.seq_id, tokens, tree, length=request.num_positions, source=source)

    def keep(self, inputs: Sequence[SequenceInput], hidden: Hidden) -> None:
        """Keep the states that later rows of these sequences take in; most models take in tokens alone."""

    def plan(self, drafting: Sequence[tuple[Request, int]]) -> list[Chain]:
        """Plan input tokens and draws for pairs (request, wanted nodes), within the token budget and the cache.

        A chain without enough room gets a lower limit; limit 0 = only catch up. The sources of all chains are encoded.
        """
        (chains, sources), plan = self._plan_inputs(drafting), self.cache.plan()
        needs = [(source.seq_id, len(source.tokens)) for source in sources]
        needs += [(chain.request.seq_id, chain.num_positions) for chain in chains]
        if not all(plan.take(*need) for need in needs):
            plan = self.cache.plan()
            chains, sources = self._plan_inputs(drafting, plan)
            _take_in_turn(plan, chains)
        self.sources.encode(sources)
        return chains

    def _plan_inputs(
        self, drafting: Sequence[tuple[Request, int]], plan: ReservationPlan | None = None
    ) -> tuple[list[Chain], list[Source]]:
        """Take each request's missing tokens within budget and room; one that still has a backlog draws nothing.

        Sources have a pass of their own before that of the chains, and so a budget of their own. Returns the chains,
        and the sources that have to be encoded first. A request whose source does not fit has no chain.
        plan: the room; None = unlimited.
        """
        budget, stop, chains, sources = self._budget, self._stop_below, list[Chain](), list[Source]()
        source_budget = self._budget
        for request, limit in drafting:
            source = self.sources.of(request)
            if source is not None and source not in sources and (rows := self.sources.missing_rows(source)):
                if rows > min(source_budget, self.sources.most_rows) or (plan and not plan.take(source.seq_id, rows)):
                    continue
                sources.append(source)
                source_budget -= rows
            start, total = self._roll_back(request), len(self.text(request))
            left = self._positions_after(start)
            most = min(budget, left) if plan is None else min(budget, left, plan.room(request.seq_id))
            missing, hidden = self._missing(request, start, most)
            if missing:
                if plan is not None:
                    plan.take(request.seq_id, len(missing))
                budget -= len(missing)
                drawn = min(limit, left - len(missing) + 1) if start + len(missing) == total else 0
                chance = MostLikely() if stop and request.params.greedy else self._chances.draft(request)
                source_id = None if source is None else source.seq_id
                chains.append(Chain(request, missing, drawn, chance, [], None, stop, hidden, source=source_id))
        return chains, sources

    def _salt(self, request: Request) -> str:
        return self.model.needs.salt(request)

    def _missing(self, request: Request, start: int, most: int) -> tuple[list[int], Tensor | None]:
        """Return the next input tokens, those from `start` on, with the hidden states that they take in."""
        return self.text(request)[start : start + most], None

    def _positions_after(self, length: int) -> int:
        """Return how many positions follow these; the engine bounds the length of texts in the target's tokens."""
        return sys.maxsize if self.vocabulary is None else max(0, self.model.max_positions - length)

    def _roll_back(self, request: Request) -> int:
        """Drop cached tokens that were not committed or that a failed pass reserved; the newest token is dropped too.

        A new sequence, and one whose salt has changed, takes over matching prefixes of other sequences. Returns how
        many tokens are left.
        """
        cached, held, salt = self._cached[request.seq_id], self.cache.length(request.seq_id), self._salt(request)
        text, committed = self.text(request), self.committed(request)
        if cached.salt != salt or (not cached.tokens and not held):
            self.cache.release(request.seq_id)
            held = self.cache.match_prefix(request.seq_id, committed, salt)
            cached.tokens, cached.agreed, cached.salt = text[:held], 0, salt
        keep, most = cached.agreed, min(len(cached.tokens), len(text) - 1)
        while keep < most and cached.tokens[keep] == text[keep]:
            keep += 1
        cached.agreed = min(keep, len(committed))
        del cached.tokens[keep:]
        if keep < held:
            self.cache.truncate_to(request.seq_id, keep)
        self.cache.insert_prefix(request.seq_id, committed)
        if keep <= len(committed):
            self.cache.drop_unseen(request.seq_id)
        return keep


def _take_in_turn(plan: ReservationPlan, chains: Sequence[Chain]) -> None:
    """Share the room left after the input tokens, one position per chain in turn, and cut the drafts to it."""
    growing = [chain for chain in chains if chain.limit > 1]
    for length in range(1, max((chain.limit for chain in growing), default=0)):
        for chain in growing:
            if not plan.take(chain.request.seq_id, 1):
                chain.limit = length
        growing = [chain for chain in growing if chain.limit > length + 1]
