"""Rejection: token-wise speculative sampling on a chain (arXiv 2211.17192, algorithm 1; arXiv 2302.01318).

Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from norm((p - q)+).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds, require_chain


class Rejection(Verifier):
    """See the module's docstring."""

    lossless = True
    needs = VerifierNeeds(shared_noise=False, branches=False)

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """The tree must be a chain."""
        require_chain(tree, "rejection")
        return verify_in_turn(tree, p, chance)


def verify_in_turn(tree: DraftTree, p: Tensor, chance: Chance, lenience: float = 1.0) -> Verdict:
    """Accept a chain's tokens one by one, each with min(1, p(x) / (lenience q(x))), up to the first rejection."""
    if tree.size == 0:
        return Verdict((), chance.draw(p[0]))
    q = draft_probs(tree, p)
    for node, ratio in enumerate(likelihood_ratios(tree, p[:-1], q)):
        if not chance.accept(min(1.0, ratio / lenience)):
            return Verdict(tuple(range(node)), chance.draw(residual(p[node], q[node])))
    return Verdict(tuple(range(tree.size)), chance.draw(p[-1]))


def draft_probs(tree: DraftTree, p: Tensor) -> Tensor:
    """Return the probs [n, V] that the nodes were drawn from, in p's type; point masses for a deterministic draft."""
    if tree.probs is not None:
        return tree.probs.to(p)
    return torch.zeros_like(p[:-1]).scatter_(1, tree.tokens.to(p.device)[:, None], 1.0)


def likelihood_ratios(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    """Return each chain node's p(x) / q(x); p and q are [n, V]."""
    tokens = tree.tokens.to(p.device)[:, None]
    pairs = zip(p.gather(1, tokens)[:, 0].tolist(), q.gather(1, tokens)[:, 0].tolist(), strict=True)
    return [ratio_of(target, draft) for target, draft in pairs]


def ratio_of(p: float, q: float) -> float:
    """Return p / q; 0 where p is 0 or q is NaN; infinite where q alone is 0."""
    if p <= 0 or math.isnan(q):
        return 0.0
    return p / q if q > 0 else math.inf


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """Return (weight p - q)+ for distributions [V], not normalised; p itself if rounding left nothing."""
    rest = (weight * p - q).clamp(min=0)
    return rest if float(rest.sum()) > 0 else p


def build() -> Rejection:
    """Make the verifier."""
    return Rejection()
