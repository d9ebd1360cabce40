"""Which rule a request gets when none was asked for."""

from __future__ import annotations

from speculant.types import Request


def choose_verifier(request: Request, deterministic: bool, branches: bool = False) -> str:
    """Return a rule's name: match where a seed, a point mass or a deterministic draft allows nothing better.

    For sampled drafts it is the rule that accepts most: block for a chain, traversal for a tree.
    """
    if request.params.seed is not None or request.params.greedy or deterministic:
        return "match"
    return "traversal" if branches else "block"
