"""The verifier of a request that names none."""

from __future__ import annotations

from speculant.types import Request


def choose_verifier(request: Request, deterministic: bool, branches: bool = False) -> str:
    """Return a verifier's name: match for a seeded or greedy request or a deterministic draft.

    For sampled drafts it is the lossless verifier that accepts most: block for a chain, traversal for a tree.
    """
    if request.params.seed is not None or request.params.greedy or deterministic:
        return "match"
    return "traversal" if branches else "block"
