"""A drafter around one model: chains, trees of a topology, and continuations of a beam search's hypotheses.

With a dynamic tree, requests that a ratio rule verifies get chains as long as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from speculant.cache import Source
from speculant.drafting.base import DrafterContext, DrafterNeeds, StatelessDrafter
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
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.topology import USUAL_NODES, DynamicTree, StaticTree, TreeTopology
from speculant.errors import ConfigError, PairError
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, Chain, SequenceInput, build_batch
from speculant.sampling import Node
from speculant.types import DraftTree, Request

NODES_PER_BEAM = 2


class ModelDrafter(StatelessDrafter):
    """Drafts with the model of `runner`, all sequences of a round in one flat batch.

    vocab_size is the target's: the draft's distributions are cut or padded with zeros to it. topology None = chains.
    """

    guess: Guess | None = None  # guesses the tokens that the model draws next

    def __init__(
        self,
        runner: DraftModelRunner,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | DynamicTree | None = None,
    ) -> None:
        nodes, dynamic = topology.most_nodes if topology else None, isinstance(topology, DynamicTree)
        self.needs = DrafterNeeds(
            max_nodes=nodes,
            emits_probs=True,
            emits_tree=topology is not None,
            usual_nodes=USUAL_NODES if dynamic else nodes,
            tree_depth=topology.depth if topology and not dynamic else None,
            own_cache=runner.owns_cache,
            target_cache=not runner.owns_cache,
            max_positions=runner.model.max_positions,
            nodes_per_beam=NODES_PER_BEAM,
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
        self.needs, self._runner.sources.reads_target = replace(self.needs, reads_encoder=True), True

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
        ranked = [(request, limit) for request, limit in drafting if request.shared_noise]
        others = [(request, min(limit, topology.depth)) for request, limit in drafting if not request.shared_noise]
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
    return ModelDrafter(DraftModelRunner.of(context, model), context.vocab_size, context.sampler, topology)


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
        return chain_input(chain, tokens, vocab_size, DraftTree.empty(), states)


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
    return request.shared_noise and request.params.greedy and not chain.stop_below and not Node(request).edited


def make_one_pass(context: DrafterContext, model: CausalLM, topology: StaticTree | DynamicTree | None) -> ModelDrafter:
    """Return the drafter of a model, with a cache of its own: in one pass if it has a mask token.

    A dynamic tree is drafted depth by depth, because its shape depends on the tokens.
    """
    mask = mask_of(model)
    if mask is None or isinstance(topology, DynamicTree):
        return make_drafter(context, model, topology)
    return OnePassDrafter(DraftModelRunner.of(context, model), mask, context.vocab_size, context.sampler, topology)
