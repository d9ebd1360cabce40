"""A drafter whose model predicts all tokens of a draft in one causal pass: PARD (arXiv 2504.18583).

    input       the committed tokens that are not in its cache    mask   mask   mask
    predicts    ...                                          d1     d2     d3     d4

The row of a mask predicts a token without knowing the drafted tokens before it. So a token's distribution depends only
on its depth, in trees too, except for edits such as penalties. The verifier gets the distribution that each token was
drawn from, so all verification rules are exact. Masks leave the cache after the pass; only committed tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.base import DrafterContext
from speculant.drafting.growth import (
    DepthProbs,
    Drafting,
    chain_input,
    draw_chains,
    draw_trees,
    fit_vocabulary,
    likeliest,
)
from speculant.drafting.guard import Proposals
from speculant.drafting.model.drafter import ModelDrafter, make_drafter
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.topology import DynamicTree, StaticTree
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, Chain, SequenceInput, build_batch
from speculant.sampling import Node
from speculant.types import DraftTree

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
    """Draws chains or trees from one pass of its model; see the module's docstring. shape: None = chains."""

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
