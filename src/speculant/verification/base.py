"""The verifier protocol: a verifier decides which drafted tokens are accepted, and which token follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from speculant.sampling import Chance
from speculant.types import DraftTree, Verdict


@dataclass(frozen=True)
class VerifierNeeds:
    """A verifier's requirements, checked at start-up.

    shared_noise: draft and target draws share keyed noise; only for verifiers that do not use p/q.
    branches: it verifies trees with siblings; else only chains.
    softened: it needs greedy requests' distributions at temperature 1, unfiltered.
    greedy: the verifier that replaces it for greedy requests; None = none does.
    """

    shared_noise: bool
    branches: bool
    softened: bool = False
    greedy: Verifier | None = None


def require_chain(tree: DraftTree, verifier: str) -> None:
    """Raise ValueError for a draft with siblings."""
    if not tree.is_chain:
        raise ValueError(f"{verifier} verifies chains; a tree with siblings needs another rule")


def follow(tree: DraftTree, token_after: Callable[[int], int]) -> Verdict | None:
    """Return the path of drafted tokens that equal the target's own, and the target's token that follows it.

    token_after: the token drawn from the target after a node, -1 = the root; negative = there is no distribution. The
    path ends before such a node; the result is None for such a root.
    """
    path, token = list[int](), token_after(-1)
    if token < 0:
        return None
    node, nodes = -1, tree.nodes_by_edge
    while (node := nodes.get((node, token), -1)) >= 0 and (following := token_after(node)) >= 0:
        path.append(node)
        token = following
    return Verdict(tuple(path), token)


_Verify = TypeVar("_Verify", bound=Callable[..., Verdict])
_FOLLOWS = "__follows__"  # an attribute of a function: the function itself


def following(verify: _Verify) -> _Verify:
    """Mark a `Verifier.verify` whose verdict is that of `follow`, with a draw by the chance after each node.

    The engine may then draw a token after every node of all sequences at once, and does not call it. A function that
    replaces or wraps it is called.
    """
    setattr(verify, _FOLLOWS, verify)
    return verify


class Verifier(Protocol):
    """Decides on drafts. If `lossless`, the output has the target's distribution for every draft.

    A verifier is a module with `build() -> Verifier`; the function's arguments are options of the speculative config.
    """

    lossless: bool
    needs: VerifierNeeds

    def verify(self, tree: DraftTree, p: Tensor, chance: Chance) -> Verdict:
        """Decide on a draft.

        p is [n + 1, V]: p[0] is the target's distribution after the root and p[1 + i] the one after node i.
        """
        ...


class CheckedVerifier(NamedTuple):
    """A verifier, and whether its verdicts follow from a draw after each node."""

    verifier: Verifier
    follows: bool

    @classmethod
    def of(cls, verifier: Verifier) -> CheckedVerifier:
        """Check a verifier, once and not at each step."""
        verify = getattr(verifier.verify, "__func__", None)
        return cls(verifier, verify is not None and getattr(verify, _FOLLOWS, None) is verify)

    def draws_after(self, tree: DraftTree) -> bool:
        """Whether the verdict on a draft follows from such draws; without a draft every rule draws after the root."""
        return self.follows or not (tree.size or self.verifier.needs.softened)


Verifiers = Mapping[tuple[str, bool], CheckedVerifier]  # by the verifier's name, and whether the request is greedy


def checked_verifiers(verifiers: Mapping[str, Verifier]) -> Verifiers:
    """Return the verifiers of requests for which one of these was chosen."""
    return {
        (name, greedy): CheckedVerifier.of((verifier.needs.greedy if greedy else None) or verifier)
        for name, verifier in verifiers.items()
        for greedy in (False, True)
    }
