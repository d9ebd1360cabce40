"""Block verification of a chain (Sun et al., arXiv 2403.10444): drafted tokens are verified together, not one by one.

    P_0 = 1    P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i))        weight of the prefix x_1 .. x_i
    Z_i = sum_v (P_i p_{i+1}(v) - q_{i+1}(v))+                  residual mass after x_i
    h_i = Z_i / (Z_i + 1 - P_i) for i < n, h_n = P_n            independent coins; the last success ends the path

Accepts at least as many tokens in expectation as `rejection`, and more for drafts of two or more tokens.
"""

from __future__ import annotations

import math

from torch import Tensor
from typing_extensions import override

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds, require_chain
from speculant.verification.rejection import draft_probs, likelihood_ratios, residual


class Block(Verifier):
    """See the module's docstring."""

    lossless = True
    needs = VerifierNeeds(shared_noise=False, branches=False)

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """The tree must be a chain."""
        require_chain(tree, "block")
        if tree.size == 0:
            return Verdict((), chance.draw(p[0]))
        q = draft_probs(tree, p)
        weights = path_weights(likelihood_ratios(tree, p[:-1], q))
        accepted = 0
        for length, probability in enumerate(coins(weights, p, q), start=1):
            if chance.accept(probability):  # every coin is drawn: a later success overrules an earlier failure
                accepted = length
        path = tuple(range(accepted))
        if accepted == tree.size:
            return Verdict(path, chance.draw(p[-1]))
        return Verdict(path, chance.draw(residual(p[accepted], q[accepted], weights[accepted])))


def path_weights(ratios: list[float]) -> list[float]:
    """Return P_0 .. P_n for the drafts' ratios p(x) / q(x)."""
    weights = [1.0]
    for ratio in ratios:
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def coins(weights: list[float], p: Tensor, q: Tensor) -> list[float]:
    """Return h_1 .. h_n; p is [n + 1, V] and q [n, V]."""
    rows = zip(weights[1:-1], p[1:-1], q[1:], strict=True)  # one by one: see sampling/choice.py
    owed = [float((weight * own - drafted).clamp(min=0).sum()) for weight, own, drafted in rows]
    return [*map(share, owed, weights[1:-1]), weights[-1]]


def share(owed: float, weight: float) -> float:
    """Return owed / (owed + 1 - weight): the probability to accept a prefix of this weight and residual mass.

    owed is NaN if the draft's distribution has NaN. The draft is then taken to end there, and h is the weight.
    """
    if math.isnan(owed):
        return weight
    missing = owed + (1.0 - weight)
    return owed / missing if missing > 0 else 1.0


def build() -> Block:
    """Make the verifier."""
    return Block()
