"""Chains of tokens that a model draws one by one, many sequences side by side: what a draft model does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM, Chain, SequenceInput, build_batch, known
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree


def grow(
    model: CausalLM, chains: Sequence[Chain], cache: KVCache, vocab_size: int, sampler: Sampler = REFERENCE
) -> None:
    """Draw every chain's tokens, over a vocabulary of `vocab_size`; the cache must have room for all.

    A chain's tokens and distributions are the same in any company, on the kernels that have invariant rows.
    """
    others = model.grow(chains, cache, vocab_size)
    _Stepwise(model, cache, vocab_size, sampler).grow([(chain, chain.input_tokens) for chain in others])


@dataclass(frozen=True)
class _Stepwise:
    """One pass per token; the definition of what a model may do by itself."""

    model: CausalLM
    cache: KVCache
    vocab_size: int
    sampler: Sampler

    def grow(self, growing: list[tuple[Chain, list[int]]]) -> None:
        """Feed and draw until no chain wants more."""
        while growing:
            growing = self._feed(growing)

    def _feed(self, feeds: Sequence[tuple[Chain, list[int]]]) -> list[tuple[Chain, list[int]]]:
        """Feed each chain's tokens, draw one for each that wants any, and return what has to be fed next."""
        size = self.model.vocab_size
        fed = [SequenceInput(chain.request.seq_id, known(tokens, size), DraftTree.empty()) for chain, tokens in feeds]
        batch = build_batch(fed, self.cache, self.model.cache_shape.device)
        hidden = self.model.forward(batch, self.cache.storage).last
        last = -1
        ends = [last := last + len(tokens) for _, tokens in feeds]
        drawing = [(chain, end) for (chain, _), end in zip(feeds, ends, strict=True) if chain.limit]
        if not drawing:
            return []
        drawn = self._draw([chain for chain, _ in drawing], hidden[[end for _, end in drawing]])
        return [(chain, chain.tokens[-1:]) for chain in drawn if len(chain.tokens) < chain.limit]

    def _draw(self, chains: Sequence[Chain], hidden: Tensor) -> list[Chain]:
        """Draw a token for each; return those that could: a row that is no distribution ends its chain."""
        logits = fit_vocabulary(self.model.logits(hidden), self.vocab_size)
        probs = distribution(logits, [Node(chain.request, chain.tokens) for chain in chains], self.sampler)
        drawn = []
        for chain, token_probs, total in zip(chains, probs, probs.sum(-1).tolist(), strict=True):
            if not 0 < total < math.inf:
                continue
            if not chain.request.shared_noise:
                chain.probs = token_probs[None] if chain.probs is None else torch.cat([chain.probs, token_probs[None]])
            chain.tokens = [*chain.tokens, chain.chance.draw(token_probs)]
            drawn.append(chain)
        return drawn


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut or pad logits [r, v] to [r, vocab_size]; padding is impossible to draw."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
