"""Lenient verification (arXiv 2211.17192, A.5): accepts more drafts, at the cost of exactness.

Sampled: accept x with probability min(1, p(x) / (l q(x))), else draw from norm((p - q)+); no token becomes likelier
than p / l. Greedy: accept x if p(x) >= l max(p), p at temperature 1. l = 1 is `rejection`, or, except for ties, greedy
verification.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from speculant.errors import ConfigError
from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds, require_chain
from speculant.verification.rejection import verify_in_turn


class Lenient(Verifier):
    """See the module's docstring; `lenience` is l."""

    lossless = False

    def __init__(self, lenience: float) -> None:
        self._lenience = lenience
        self.needs = VerifierNeeds(shared_noise=False, branches=False, greedy=LenientGreedy(lenience))

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """The tree must be a chain."""
        require_chain(tree, "lenient")
        return verify_in_turn(tree, p, chance, self._lenience)


class LenientGreedy(Verifier):
    """The verifier for greedy requests: accepts the likeliest child if p(x) >= l max(p)."""

    lossless = False
    needs = VerifierNeeds(shared_noise=True, branches=True, softened=True)

    def __init__(self, lenience: float) -> None:
        self._lenience = lenience

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """The verdict is deterministic."""
        path, node = list[int](), -1
        while True:
            token_probs = p[1 + node]
            likelihoods = {child: float(token_probs[tree.token_list[child]]) for child in tree.children(node)}
            best = max(likelihoods, key=likelihoods.__getitem__, default=None)
            if best is None or not likelihoods[best] >= self._lenience * float(token_probs.max()):
                return Verdict(tuple(path), int(token_probs.argmax()))
            path.append(node := best)


def build(lenience: float = 0.5) -> Lenient:
    """Make the verifier; with l = 0.5 no token is sampled with more than twice its target probability."""
    given: object = lenience
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 < given <= 1:
        raise ConfigError(f"lenience={lenience!r} is not a number above 0 and up to 1", "use for example 0.5.")
    return Lenient(float(lenience))
