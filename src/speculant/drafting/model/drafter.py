"""A draft model: its KV cache, and the drafter around it, which draws many sequences in one batch.

It drafts chains, trees of a topology, and continuations of a beam search's hypotheses. With a dynamic tree, requests
that a ratio rule verifies get chains as long as the tree is deep.

The cache holds committed tokens, and possibly drafts of the last round. The next round rolls back the
drafts that were rejected and computes the tokens that are missing:

    cached     p p p t t x x x          x = the drafts of the last round
    tokens     p p p t t x y            y = the target's correction
    keep       p p p t t x              the longest common prefix; y is the next input

The tokens belong to the draft model's tokenizer, which may read a text as other and more tokens than the target's
(models/vocabulary.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import KVCache, ReservationPlan, Source, Sources
from speculant.drafting.base import DrafterContext, DrafterNeeds, DrafterReads, StatelessDrafter
from speculant.drafting.composite import Proposals
from speculant.drafting.growth import (
    DepthProbs,
    Drafting,
    Guess,
    chain_input,
    draft_beams,
    draft_shaped,
    draw_chains,
    draw_trees,
    fit_vocabulary,
    grow_by_passes,
    grow_chains,
    grow_trees,
    likeliest,
)
from speculant.drafting.topology import USUAL_NODES, DynamicTree, StaticTree, TreeTopology
from speculant.errors import ConfigError, PairError
from speculant.kernels import REFERENCE, Sampler
from speculant.models import (
    CausalLM,
    Chain,
    MappedVocabulary,
    SequenceInput,
    build_batch,
    encode_sources,
    known,
)
from speculant.sampling import Chances, MostLikely, Node
from speculant.types import DraftPrice, DraftTree, Request

NODES_PER_BEAM = 2
FETCH_S = 0.05  # of a round, for reading prefixes of new sequences from the disk; the rest is computed
MOST_LIKELY = MostLikely()  # a greedy distribution has one token, which any chance draws


class DraftSources:
    """The encoded sources in the cache of an encoder-decoder draft model.

    reads_target: their keys and values are computed from the results of the target's encoder, which `observe` gets.

    The draft model has an encoder of its own, and its cache has a sequence for each source, as the target's has. A
    source is encoded before its text's first draft, in a round whose budget and cache have room for all of it. Until
    then the text gets no draft. Equal sources of one salt are encoded once; each is released with the last text that
    holds it.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self._model, self._cache, self._sources = model, cache, Sources(cache)
        self._observed: dict[int, Source] = {}  # the target's sources, by the sequence id of the text
        self.reads_target = False

    def of(self, request: Request) -> Source | None:
        """Return the source of a request's text, which holds it from now on; None = the model reads none."""
        if not self._model.needs.source:
            return None
        held = self._sources.of(request.seq_id)
        return held or self._sources.hold(request.seq_id, request.source, request.sender.cache_salt)

    def id_of(self, request: Request) -> int | None:
        """Return the sequence id of the source of a request's text; see `SequenceInput.source`."""
        source = self.of(request)
        return None if source is None else source.seq_id

    @property
    def most_rows(self) -> int:
        """The length of the longest source that can be encoded; the target's encoder has already read its own."""
        return sys.maxsize if self.reads_target else self._model.max_positions

    def missing_rows(self, source: Source) -> int:
        """Return how many rows have to be computed for a source before its texts; 0 = it is encoded."""
        return 0 if self._sources.is_encoded(source) else len(source.tokens)

    def encode(self, sources: Sequence[Source]) -> None:
        """Encode sources, for which the cache has room; after an error none of them is in the cache."""
        if sources:
            given = [self._result(source) for source in sources] if self.reads_target else None
            encode_sources(self._model, self._cache, sources, given=given)

    def _result(self, source: Source) -> Tensor:
        """Return the result [tokens, hidden] of the target's encoder."""
        states = self._observed[next(iter(source.holders))].states
        assert states is not None, "the states of sources are not kept"
        return states

    def observe(self, request: Request, source: Source) -> None:
        """Keep the target's source of a request."""
        self._observed[request.seq_id] = source

    def release(self, request: Request) -> None:
        """Release the source of a request."""
        self._observed.pop(request.seq_id, None)
        self._sources.release(request.seq_id)

    def check(self) -> None:
        """See `Sources.check`."""
        self._sources.check()


class TargetSources(DraftSources):
    """The target's own sources, for a model that uses the target's cache."""

    @override
    def of(self, request: Request) -> Source | None:
        return self._observed.get(request.seq_id)


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
    _shared: KVCache | None = None  # the target's cache, if the model uses it
    vocabulary: MappedVocabulary | None = None
    price = DraftPrice()

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
        self._fetch_s = 0.0  # left in this round

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
        context.models.keep_prompts(model, cache)
        made = cls(model, cache, context.chances, context.max_num_batched_tokens, context.stop_below, **own)
        made.vocabulary, made.price = context.models.vocabulary_of(model), context.price
        return made

    def begin(self, request: Request) -> None:
        """Start a new sequence; nothing is computed before the first draft (docs/references.md, lazy prefill)."""
        self._cached[request.seq_id] = _CachedTokens()

    def end(self, request: Request) -> None:
        """Forget a sequence, and release its blocks and its source."""
        self._cached.pop(request.seq_id, None)
        self.cache.mark_used(request.seq_id)
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

    def tree_input(self, request: Request, tree: DraftTree, carried: Tensor | None) -> SequenceInput:
        """Return the input of a root and the tree below it, after dropping them from the cache.

        carried [1 + n, hidden]: the states that the root and each node of the last pass hand on, if any.
        """
        text, size = self.text(request), self.model.vocab_size
        self.cache.truncate_to(request.seq_id, len(text) - 1)
        tokens, own = known(text[-1:], size), DraftTree.of(known(tree.token_list, size), tree.parent_list)
        source = self.sources.id_of(request)
        return SequenceInput(request.seq_id, tokens, own, length=request.num_positions, source=source)

    def plan(self, drafting: Sequence[tuple[Request, int]]) -> list[Chain]:
        """Plan input tokens and draws for pairs (request, wanted nodes), within the token budget and the cache.

        A chain without enough room gets a lower limit; limit 0 = only catch up. The sources of all chains are encoded.
        """
        (chains, sources), plan, fits = self._plan_inputs(drafting), ReservationPlan(self.cache), True
        for source in sources:
            fits = fits and plan.take(source.seq_id, len(source.tokens))
        for chain in chains:
            fits = fits and plan.take(chain.request.seq_id, chain.num_positions)
        if not fits:
            plan = ReservationPlan(self.cache)
            chains, sources = self._plan_inputs(drafting, plan)
            _take_in_turn(plan, chains)
        if sources:
            self.sources.encode(sources)
        return chains

    def _plan_inputs(
        self, drafting: Sequence[tuple[Request, int]], plan: ReservationPlan | None = None
    ) -> tuple[list[Chain], list[Source]]:
        """Take each request's missing tokens within budget and room; one that still has a backlog draws nothing.

        Sources have a pass of their own before the chains' pass, and so a budget of their own. Returns the chains, and
        the sources that have to be encoded first. A request whose source does not fit has no chain.
        plan: the room; None = unlimited.
        """
        self._fetch_s = FETCH_S
        budget, stop, chains, sources = self._budget, self._stop_below, list[Chain](), list[Source]()
        source_budget, source = self._budget, None
        for request, limit in drafting:
            if self.model.needs.source and (source := self.sources.of(request)) is not None and source not in sources:
                rows = self.sources.missing_rows(source)
                if rows:
                    if rows > min(source_budget, self.sources.most_rows) or (
                        plan and not plan.take(source.seq_id, rows)
                    ):
                        continue
                    sources.append(source)
                    source_budget -= rows
            start, text = self._roll_back(request)
            left = sys.maxsize if self.vocabulary is None else max(0, self.model.max_positions - start)
            most = min(budget, left) if plan is None else min(budget, left, plan.room(request.seq_id))
            missing, hidden = self._missing(request, text, start, most)
            if missing:
                if plan is not None:
                    plan.take(request.seq_id, len(missing))
                budget -= len(missing)
                drawn = min(limit, left - len(missing) + 1) if start + len(missing) == len(text) else 0
                drawn = drawn if self.model.needs.most_nodes is None else min(drawn, self.model.needs.most_nodes)
                chance = MOST_LIKELY if request.params.greedy else self._chances.draft(request)
                source_id = None if source is None else source.seq_id
                certain = None if self._shared is None else 0  # the target's states stay as they are
                if request.num_drafted and certain is None:
                    certain = max(0, len(self.committed(request)) - start)
                chain = Chain(request, missing, drawn, chance, [], None, stop, hidden, stop_path=self.price.least)
                chain.source, chain.certain = source_id, certain
                chains.append(chain)
        return chains, sources

    def _missing(self, request: Request, text: list[int], start: int, most: int) -> tuple[list[int], Tensor | None]:
        """Return the next input tokens, `text` from `start` on, with the hidden states that they take in."""
        return text[start : start + most], None

    def _roll_back(self, request: Request) -> tuple[int, list[int]]:
        """Drop cached tokens that were not committed or that a failed pass reserved; the newest token is dropped too.

        A new sequence, and one whose salt has changed, takes over matching prefixes of other sequences. Returns how
        many tokens are left, and the text.
        """
        cached, held, salt = (
            self._cached[request.seq_id],
            self.cache.length(request.seq_id),
            self.model.needs.salt(request),
        )
        text = request.tokens if self.vocabulary is None else self.text(request)
        committed = self.committed(request) if request.num_drafted or self.vocabulary is not None else text
        if cached.salt != salt or (not cached.tokens and not held):
            self.cache.release(request.seq_id)
            if self._fetch_s > 0:
                started = time.perf_counter()
                self.cache.fetch(committed, salt, self._fetch_s)
                self._fetch_s -= time.perf_counter() - started
            held = self.cache.match_prefix(request.seq_id, committed, salt)
            cached.tokens, cached.agreed, cached.salt = text[:held], 0, salt
        keep, most = cached.agreed, min(len(cached.tokens), len(text) - 1)
        while keep < most and cached.tokens[keep] == text[keep]:
            keep += 1
        cached.agreed = min(keep, len(committed))
        del cached.tokens[keep:]
        if keep < held:
            self.cache.truncate_to(request.seq_id, keep)
            keep = self.cache.length(request.seq_id)  # less, if a state is lost
            del cached.tokens[keep:]
        self.cache.insert_prefix(request.seq_id, committed)
        if self.cache.is_windowed and keep <= len(committed):
            self.cache.drop_unseen(request.seq_id)
        return keep, text


def _take_in_turn(plan: ReservationPlan, chains: Sequence[Chain]) -> None:
    """Share the room left after the input tokens, one position per chain in turn, and cut the drafts to it."""
    growing = [chain for chain in chains if chain.limit > 1]
    for length in range(1, max((chain.limit for chain in growing), default=0)):
        for chain in growing:
            if not plan.take(chain.request.seq_id, 1):
                chain.limit = length
        growing = [chain for chain in growing if chain.limit > length + 1]


class ModelDrafter(StatelessDrafter):
    """Drafts with the model of `runner`, all sequences of a round in one flat batch.

    vocab_size is the target's: the draft's distributions are cut or padded with zeros to it. topology None = chains.
    """

    guess: Guess | None = None  # guesses the tokens that the model draws next
    draws_in_turn = True  # a chain's tokens, a pass for each

    def __init__(
        self,
        runner: DraftModelRunner,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | DynamicTree | None = None,
    ) -> None:
        if topology is not None and runner.model.needs.most_nodes is not None:
            raise ConfigError(
                "the draft model has layers with a state, which draft chains alone", "leave out the shape of the tree."
            )
        nodes, dynamic = topology.most_nodes if topology else None, isinstance(topology, DynamicTree)
        self.needs = DrafterNeeds(
            max_nodes=nodes,
            emits_probs=True,
            emits_tree=topology is not None,
            usual_nodes=USUAL_NODES if dynamic else nodes,
            tree_depth=topology.depth if topology and not dynamic else None,
            max_positions=runner.model.max_positions,
            nodes_per_beam=NODES_PER_BEAM,
            reads=DrafterReads(target_cache=not runner.owns_cache),
            own_cache=runner.owns_cache,
            stops=self.draws_in_turn and topology is None and runner.owns_cache,
        )
        self._runner, self.caches = runner, (runner.cache,) if runner.owns_cache else ()
        self._vocab_size, self._sampler, self._topology = vocab_size, sampler, topology

    def read_encoder(self, target: CausalLM | None) -> None:
        """Read the results of the target's encoder instead of running its own. Raises ConfigError or PairError."""
        model = self._runner.model
        if target is None or not (target.needs.source and model.needs.source):
            raise ConfigError(
                'encoder="target" is set, and target and draft model are not both encoder-decoder models', "remove it."
            )
        if model.hidden_size != target.hidden_size:
            raise PairError(
                f'encoder="target" is set, and states have the width {target.hidden_size} in the target and '
                f"{model.hidden_size} in the draft model",
                "leave it out, so that the draft model runs its own encoder.",
            )
        self.needs = replace(self.needs, reads=replace(self.needs.reads, encoder=True))
        self._runner.sources.reads_target = True

    @override
    def begin(self, request: Request) -> None:
        self._runner.begin(request)

    @override
    def end(self, request: Request) -> None:
        self._runner.end(request)

    @override
    def observe_source(self, request: Request, source: Source) -> None:
        self._runner.sources.observe(request, source)

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Do nothing: the runner compares the tokens in its cache with the request's anyway."""

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        self._draw([(request, 0) for request in requests], None)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafting, searching = list[tuple[Request, int]](), list[tuple[Request, int]]()
        for request, limit in zip(requests, limits, strict=True):
            if limit > 0:
                (drafting if request.search is None else searching).append((request, limit))
        topology = self._topology
        if isinstance(topology, DynamicTree):
            drafts = self._draft_dynamic(drafting, topology)
        else:
            drafts = self._draw(drafting, topology)
        if searching:
            drafts |= self._draft_beams(searching)
        found, empty = list[DraftTree](), DraftTree.empty()
        for request in requests:
            found.append(drafts.get(request.seq_id, empty))
        return found

    def _draft_dynamic(self, drafting: Drafting, topology: DynamicTree) -> Proposals:
        """Draft dynamic trees, and chains as deep for requests with ratio rules, which such a shape would bias."""
        ranked = [(request, limit) for request, limit in drafting if request.drafts.shared_noise]
        others = [
            (request, min(limit, topology.depth)) for request, limit in drafting if not request.drafts.shared_noise
        ]
        drafts = self._draw(others, None) if others else Proposals()
        return drafts | self._draw(ranked, topology)

    def _draw(self, drafting: Drafting, topology: TreeTopology | DynamicTree | None) -> Proposals:
        """Draft for pairs (request, limit); topology None = chains."""
        runner, drafts = self._runner, Proposals()
        if isinstance(topology, StaticTree | DynamicTree):
            return draft_shaped(runner, drafting, topology, self._vocab_size, self._sampler)
        if topology is not None:
            return grow_trees([runner], drafting, topology, self._vocab_size, self._sampler)
        chains, growing = runner.plan(drafting), (runner.cache, self._vocab_size, self._sampler)
        if self.guess is None:
            grow_chains(runner.model, chains, *growing)
        else:
            grow_by_passes(runner.model, chains, *growing, self.guess)
        for chain in chains:
            runner.note(chain.request, [*chain.input_tokens, *chain.tokens[:-1]])
            if chain.tokens:
                drafts[chain.request.seq_id] = chain.draft()
        return drafts

    def _draft_beams(self, drafting: Drafting) -> Proposals:
        """Draft for beam searches, at most as deep as the configured tree."""
        if self._topology is not None:
            level = NODES_PER_BEAM * self._topology.depth
            drafting = [
                (request, min(limit, level * request.search.beams.width))
                for request, limit in drafting
                if request.search is not None
            ]
        return draft_beams(self._runner, drafting, NODES_PER_BEAM, self._vocab_size, self._sampler)


def make_drafter(context: DrafterContext, model: CausalLM, topology: TreeTopology | DynamicTree | None) -> ModelDrafter:
    """Return the drafter of a model, with a cache of its own; topology None = chains."""
    return ModelDrafter(
        DraftModelRunner.of(context, model), context.target.vocab_size, context.target.sampler, topology
    )


USUAL_LENGTH = 8  # PARD's models are trained for 8 to 16


@runtime_checkable
class Masked(Protocol):
    """A `CausalLM` that may have been trained to read masks."""

    @property
    def mask_token(self) -> int | None:
        """The token that stands for an unknown one; None = it has none."""
        ...


def mask_of(model: CausalLM) -> int | None:
    """Return a model's mask token; None = it predicts one token in a pass."""
    return model.mask_token if isinstance(model, Masked) else None


@dataclass(frozen=True)
class Mask:
    """What a row reads in place of an unknown token: a token and, for a head, a hidden state [hidden]."""

    token: int
    state: Tensor | None = None

    def input(self, chain: Chain, count: int, vocab_size: int) -> SequenceInput:
        """Return the input of a chain's tokens and of `count` masks after them, for a model of `vocab_size` tokens."""
        states = chain.hidden
        if states is not None and self.state is not None:
            states = torch.cat((states, self.state.to(states.dtype).expand(count, -1)))
        tokens = [*chain.input_tokens, *[self.token] * count]
        certain = len(chain.input_tokens) if chain.certain is None else chain.certain
        return chain_input(chain, tokens, vocab_size, DraftTree.empty(), states)._replace(certain=certain)


class OnePass(ModelDrafter):
    """Draws chains or trees from one pass of its model. shape: None = chains.

    The model predicts all tokens of a draft in one causal pass: PARD (arXiv 2504.18583).

        input       the committed tokens that are not in its cache    mask   mask   mask
        predicts    ...                                          d1     d2     d3     d4

    The row of a mask predicts a token without knowing the drafted tokens before it. So a token's distribution depends
    only on its depth, in trees too, except for edits such as penalties. The verifier gets the distribution that each
    token was drawn from, so all verification rules are exact. Masks leave the cache after the pass; only committed
    tokens stay.
    """

    draws_in_turn = False
    mask: Mask
    shape: StaticTree | None

    @override
    def _draw(self, drafting: Drafting, topology: object) -> Proposals:
        chains, drafts, others = self._runner.plan(drafting), Proposals(), list[Chain]()
        shapes = [self._drafted_shape(chain.limit) for chain in chains]
        logits, first = self._pass(chains, [shape.depth if shape else 0 for shape in shapes])
        for chain, shape in zip(chains, shapes, strict=True):
            if shape and _ranks(chain):
                drafts[chain.request.seq_id] = likeliest(logits[first[chain.request.seq_id] :], shape)
            elif shape:
                others.append(chain)
        probs = DepthProbs(logits, first, 1, self._sampler)
        made = draw_trees(others, self.shape, probs) if self.shape else draw_chains(others, probs)
        return drafts | {chain.request.seq_id: draft for chain, draft in zip(others, made, strict=True) if draft.size}

    def _drafted_shape(self, limit: int) -> StaticTree | None:
        """Return the shape of a draft of up to `limit` nodes; None = it has none."""
        if not limit:
            return None
        return self.shape.within(limit) if self.shape else _chain_of(limit)

    def _pass(self, chains: Sequence[Chain], depths: Sequence[int]) -> tuple[Tensor, dict[int, int]]:
        """Compute the chains' input tokens, and a mask for each level of a draft but the first.

        Returns the logits [sum of depths, V], and each sequence's first row. Afterwards the masks leave the cache.
        """
        model, cache = self._runner.model, self._runner.cache
        inputs, first, rows, end = list[SequenceInput](), dict[int, int](), list[int](), 0
        for chain, depth in zip(chains, depths, strict=True):
            inputs.append(self.mask.input(chain, max(0, depth - 1), model.vocab_size))
            end += len(inputs[-1].tokens)
            first[chain.request.seq_id] = len(rows)
            rows += range(end - depth, end)
        if not inputs:
            return torch.empty(0, self._vocab_size), first
        hidden = model.forward(build_batch(inputs, cache, model.cache_shape.device), cache.storage).last[rows]
        for chain, depth in zip(chains, depths, strict=True):
            self._runner.note(chain.request, chain.input_tokens)
            if depth > 1:
                self._runner.finish(chain.request)
        return fit_vocabulary(model.logits(hidden), self._vocab_size) if rows else hidden, first


class OnePassDrafter(OnePass):
    """Drafts with the model of `runner`, whose mask is `mask`."""

    def __init__(
        self,
        runner: DraftModelRunner,
        mask: int,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: StaticTree | None = None,
    ) -> None:
        super().__init__(runner, vocab_size, sampler, topology)
        self.needs = replace(self.needs, usual_nodes=self.needs.usual_nodes or USUAL_LENGTH)
        self.mask, self.shape = Mask(mask), topology


@lru_cache(maxsize=64)
def _chain_of(length: int) -> StaticTree:
    return StaticTree.of_widths([1] * length)


def _ranks(chain: Chain) -> bool:
    """Whether a draft consists of the likeliest tokens, as the logits rank them, and none ends it."""
    request = chain.request
    return request.drafts.shared_noise and request.params.greedy and not chain.stop_below and not Node(request).edited


def make_one_pass(context: DrafterContext, model: CausalLM, topology: StaticTree | DynamicTree | None) -> ModelDrafter:
    """Return the drafter of a model, with a cache of its own: in one pass if it has a mask token.

    A dynamic tree is drafted depth by depth, because its shape depends on the tokens.
    """
    mask = mask_of(model)
    if mask is None or isinstance(topology, DynamicTree):
        return make_drafter(context, model, topology)
    return OnePassDrafter(
        DraftModelRunner.of(context, model), mask, context.target.vocab_size, context.target.sampler, topology
    )
