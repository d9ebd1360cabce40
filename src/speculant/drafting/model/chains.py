"""Chains of tokens that a draft model draws one by one, many sequences in one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculant.cache.base import KVCache
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM, Chain, Hidden, SequenceInput, build_batch, known
from speculant.sampling.distribution import Node, distribution
from speculant.types import DraftTree

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
                SequenceInput(chain.request.seq_id, known(tokens, size), _known_tree(tree, size), hidden=states)
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
