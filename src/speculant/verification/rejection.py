"""Rejection: token-wise speculative sampling on a chain [000, 001 D5, 002 algorithm 1, 003 1.1].

Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from norm((p - q)+).
"""

from __future__ import annotations

import torch
from torch import Tensor

from speculant.sampling.chance import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import VerifierNeeds


class Rejection:
    """See the module's text."""

    lossless = True
    needs = VerifierNeeds(coupled=False, branches=False)

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """See `Verifier.verify`; the tree must be a chain."""
        if not tree.is_chain:
            raise ValueError("rejection verifies chains; a tree with siblings needs another rule")
        if tree.size == 0:
            return Verdict((), chance.draw(p[0]))
        q = draft_laws(tree, p)
        for node, probability in enumerate(acceptance(tree, p[:-1], q)):
            if not chance.accept(probability):
                return Verdict(tuple(range(node)), chance.draw(residual(p[node], q[node])))
        return Verdict(tuple(range(tree.size)), chance.draw(p[-1]))


def draft_laws(tree: DraftTree, p: Tensor) -> Tensor:
    """Return the laws [n, V] the nodes were drawn from, in p's type; point masses for a deterministic draft."""
    if tree.probs is not None:
        return tree.probs.to(p)
    return torch.zeros_like(p[:-1]).scatter_(1, tree.tokens.to(p.device)[:, None], 1.0)


def acceptance(tree: DraftTree, p: Tensor, q: Tensor) -> list[float]:
    """Return each chain node's min(1, p(x) / q(x)), 0 where p(x) is 0; p and q are [n, V]."""
    tokens = tree.tokens.to(p.device)[:, None]
    target, draft = p.gather(1, tokens)[:, 0], q.gather(1, tokens)[:, 0]
    ratio = torch.where(target > 0, target / draft, 0.0)
    return [float(value) for value in ratio.clamp(max=1.0).tolist()]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return (p - q)+ for laws [V], not normalised; p itself if rounding left nothing."""
    rest = (p - q).clamp(min=0)
    return rest if float(rest.sum()) > 0 else p


def build() -> Rejection:
    """Make the rule."""
    return Rejection()
