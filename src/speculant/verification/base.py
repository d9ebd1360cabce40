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

    coupled: draft and target draws share keyed noise (only rules that never look at p/q).
    branches: trees with siblings are understood; else only chains.
    softened: greedy requests' laws are wanted at temperature 1, unfiltered.
    greedy: what greedy requests get in the rule's place; None = the rule itself.
    """

    coupled: bool
    branches: bool
    softened: bool = False
    greedy: Verifier | None = None


def rule_for(rule: Verifier, request: Request) -> Verifier:
    """Return what checks a request's drafts where `rule` was chosen."""
    return rule.needs.greedy or rule if request.params.greedy else rule


def require_chain(tree: DraftTree, rule: str) -> None:
    """Raise ValueError for a draft with siblings."""
    if not tree.is_chain:
        raise ValueError(f"{rule} verifies chains; a tree with siblings needs another rule")


class Verifier(Protocol):
    """A rule that keeps the target's law (if `lossless`) whatever was drafted.

    A rule is a module with `build() -> Verifier`; the function's arguments are options of the speculative config.
    """

    lossless: bool
    needs: VerifierNeeds

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Decide on a draft.

        p is [n + 1, V]: p[0] is the target's law after the root and p[1 + i] the one after node i.
        """
        ...
