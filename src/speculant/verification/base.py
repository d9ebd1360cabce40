"""What a verification rule is: it decides which drafted tokens stand, and what follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from speculant.sampling.chance import Chance
from speculant.types import DraftTree, Request, Verdict


@dataclass(frozen=True)
class VerifierNeeds:
    """What a rule announces to the engine, checked at start-up.

    on shared noise: draft and target draws share keyed noise (only rules that never look at p/q).
    branches: trees with siblings are understood; else only chains.
    softened: greedy requests' distributions are wanted at temperature 1, unfiltered.
    greedy: what greedy requests get in the rule's place; None = the rule itself.
    """

    shared_noise: bool
    branches: bool
    softened: bool = False
    greedy: Verifier | None = None


def verifier_for(verifier: Verifier, request: Request) -> Verifier:
    """Return what checks a request's drafts where `rule` was chosen."""
    return verifier.needs.greedy or verifier if request.params.greedy else verifier


def require_chain(tree: DraftTree, verifier: str) -> None:
    """Raise ValueError for a draft with siblings."""
    if not tree.is_chain:
        raise ValueError(f"{verifier} verifies chains; a tree with siblings needs another rule")


class Verifier(Protocol):
    """A rule that keeps the target's distribution (if `lossless`) whatever was drafted.

    A rule is a module with `build() -> Verifier`; the function's arguments are options of the speculative config.
    """

    lossless: bool
    needs: VerifierNeeds

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Decide on a draft.

        p is [n + 1, V]: p[0] is the target's distribution after the root and p[1 + i] the one after node i.
        """
        ...
