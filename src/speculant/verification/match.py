"""Match: sample from the target as if nothing had been drafted, and accept the drafts that agree.

Lossless for any tree and drafter that does not look at the noise used for the target's own draws;
with keyed noise the output is that of plain seeded decoding, token for token. Greedy verification,
of a chain (arXiv 1811.03115) or a tree (arXiv 2305.09781), is the case of point masses.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds, follow, following


class Match(Verifier):
    """See the module's docstring."""

    lossless = True
    needs = VerifierNeeds(shared_noise=True, branches=True)

    @override
    @following
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        verdict = follow(tree, lambda node: chance.draw(p[1 + node]))
        assert verdict is not None, "a draw is a token"
        return verdict


def build() -> Match:
    """Make the verifier."""
    return Match()
