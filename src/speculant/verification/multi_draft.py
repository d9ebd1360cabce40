"""Multi-draft rejection on a tree (arXiv 2305.09781, arXiv 2402.12374): at each node, the children are tested in order.

r = p; accept child x with probability min(1, r(x) / q(x)), where q is the distribution that it was drawn from, else
continue with r = norm((r - q)+). The q of a child drawn without replacement excludes its elder siblings, so one rule
covers draws with replacement, without replacement, and from different models.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier, VerifierNeeds
from speculant.verification.rejection import draft_probs, ratio_of, residual


class MultiDraft(Verifier):
    """See the module's docstring."""

    lossless = True
    needs = VerifierNeeds(shared_noise=False, branches=True)

    @override
    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Siblings are tested in order."""
        q, path, node = draft_probs(tree, p), list[int](), -1
        while True:
            children = tree.children(node)
            tokens = [tree.token_list[child] for child in children]
            accepted, rest = choose(p[1 + node], tokens, [q[child] for child in children], chance)
            if accepted is None:
                return Verdict(tuple(path), chance.draw(rest))
            node = children[accepted]
            path.append(node)


def choose(p: Tensor, tokens: Sequence[int], q: Sequence[Tensor], chance: Chance) -> tuple[int | None, Tensor]:
    """Test proposals in order; return the accepted one's index, or None and the distribution to draw from instead.

    p is [V], and q are the distributions [V] that the k tokens were drawn from.
    """
    rest = p
    for index, token in enumerate(tokens):
        if chance.accept(min(1.0, ratio_of(float(rest[token]), float(q[index][token])))):
            return index, rest
        rest = residual(rest, q[index])
        rest = rest / rest.sum()
    return None, rest


def iterative_speculative_sample(p: Tensor, q: Tensor, chance: Chance) -> int:
    """Return a draw from p [V] that is one of K proposals wherever possible (arXiv 2305.09781).

    q [K, V] holds the distribution that each proposal is drawn from, independently of the others.
    """
    tokens = [chance.draw(token_probs) for token_probs in q]
    accepted, rest = choose(p, tokens, [*q], chance)
    return chance.draw(rest) if accepted is None else tokens[accepted]


def build() -> MultiDraft:
    """Make the verifier."""
    return MultiDraft()
