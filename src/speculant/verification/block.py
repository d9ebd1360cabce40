"""Block verification of a chain (Sun et al., arXiv 2403.10444): drafts are judged together, not token by token.

    P_0 = 1    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))        how far the target would go along with x_1 .. x_i
    Z_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+                  what the target still owes behind x_i
    h_i = Z_i / (Z_i + 1 - P_i) for i < n, h_n = P_n            independent coins; the last success says where to stop

Never accepts fewer tokens in expectation than `rejection`, and more from two drafts on.
"""

from __future__ import annotations

import math

from torch import Tensor

from speculant.sampling.chance import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import VerifierNeeds, require_chain
from speculant.verification.rejection import draft_probs, likelihood_ratios, residual


class Block:
    """See the module's text."""

    lossless = True
    needs = VerifierNeeds(shared_noise=False, branches=False)

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """See `Verifier.verify`; the tree must be a chain."""
        require_chain(tree, "block")
        if tree.size == 0:
            return Verdict((), chance.draw(p[0]))
        q = draft_probs(tree, p)
        weights = path_weights(likelihood_ratios(tree, p[:-1], q))
        kept = 0
        for place, probability in enumerate(coins(weights, p, q), start=1):
            if chance.accept(probability):  # all are thrown: a later success overrules an earlier failure
                kept = place
        path = tuple(range(kept))
        if kept == tree.size:
            return Verdict(path, chance.draw(p[-1]))
        return Verdict(path, chance.draw(residual(p[kept], q[kept], weights[kept])))


def path_weights(ratios: list[float]) -> list[float]:
    """Return P_0 .. P_n for the drafts' ratios p(x) / q(x)."""
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def coins(weights: list[float], p: Tensor, q: Tensor) -> list[float]:
    """Return h_1 .. h_n; p is [n + 1, V] and q [n, V]."""
    inner = p.new_tensor(weights[1:-1])[:, None]
    owed = (inner * p[1:-1] - q[1:]).clamp(min=0).sum(-1).tolist()
    return [*map(share, owed, weights[1:-1]), weights[-1]]


def share(owed: float, weight: float) -> float:
    """Return owed / (owed + 1 - weight): how much of what is missing to a full draft is owed behind it.

    Where a draft's distribution has NaN, so has owed, and the draft counts as ended before it: the weight is its own.
    """
    if math.isnan(owed):
        return weight
    missing = owed + (1.0 - weight)
    return owed / missing if missing > 0 else 1.0


def build() -> Block:
    """Make the rule."""
    return Block()
