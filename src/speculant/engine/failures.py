"""Rows of the target that are no distribution, and what they cost.

The row of a token that was committed is the request's error. The row of a drafted node costs the draft below it: the
node may be accepted, for its parent's row decides that, but it is then the last token of the verdict. The next pass
has its row as that of a committed token. So an output ends where it would without a draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from speculant.beams import Beams
from speculant.errors import RequestError, SpeculantError
from speculant.sampling.chance import Chance
from speculant.sampling.ranking import rank
from speculant.types import DraftTree, Verdict
from speculant.verification.base import Verifier


def failure_of(largest: float) -> SpeculantError | None:
    """Return what is wrong with a row of `distribution` whose largest probability this is; None if nothing is."""
    if largest == 0:
        return RequestError(
            "no token is possible: all are banned by the constraint, bad_words, allowed_token_ids, logit_bias or"
            " min_tokens, or by the model itself",
            "allow at least one token in every place.",
        )
    return None if math.isfinite(largest) else not_finite()


def not_finite() -> SpeculantError:
    """Return the error of logits that are NaN or +infinity."""
    return SpeculantError(
        "the target model produced logits that are NaN or infinite", "check the checkpoint, or load it in float32."
    )


def verify_sound(verifier: Verifier, tree: DraftTree, p: Tensor, maxima: Sequence[float], chance: Chance) -> Verdict:
    """Verify a tree by the rows of p [n + 1, V] that are distributions, as the root's is; see `row_maxima`."""
    sound = min(maxima) > 0 and math.isfinite(sum(maxima))
    failed = set() if sound else {node for node in range(tree.size) if not 0 < maxima[1 + node] < math.inf}
    if not failed:
        return verifier.verify(tree, p, chance)
    nodes = _not_below(tree, failed)
    p = p[[0, *(1 + node for node in nodes)]]
    for place, node in enumerate(nodes):
        if node in failed:  # a leaf by now: what is drawn from its row is not used
            p[1 + place] = 0.0
            p[1 + place, 0] = 1.0
    verdict = verifier.verify(_only(tree, nodes), p, chance)
    path = tuple(nodes[node] for node in verdict.path)
    if path and path[-1] in failed:
        return Verdict(path[:-1], tree.token_list[path[-1]])
    return Verdict(path, verdict.token)


def _not_below(tree: DraftTree, failed: set[int]) -> list[int]:
    """Return the nodes that have no ancestor among the failed ones."""
    below: set[int] = set()
    for node, parent in enumerate(tree.parent_list):
        if parent in failed or parent in below:
            below.add(node)
    return [node for node in range(tree.size) if node not in below]


def _only(tree: DraftTree, nodes: Sequence[int]) -> DraftTree:
    """Return the tree of some nodes, whose parents are among them."""
    places = {-1: -1, **{node: place for place, node in enumerate(nodes)}}
    parents = [places[tree.parent_list[node]] for node in nodes]
    probs = None if tree.probs is None else tree.probs[list(nodes)]
    return DraftTree.of([tree.token_list[node] for node in nodes], parents, probs)


def advance_sound(
    beams: Beams, tree: DraftTree, nodes: Sequence[int], probs: Tensor, maxima: Sequence[float]
) -> Beams | SpeculantError:
    """Advance a search by the probs [len(nodes), V] after nodes of a tree, -1 = the root.

    A text without a possible token has no continuations. A live hypothesis whose row is NaN is an error; a drafted one
    waits for the next pass.
    """
    ranked = dict(zip(nodes, rank(probs, beams.width, beams.end_token_ids), strict=True))
    finite = {node: ranked[node] for node, largest in zip(nodes, maxima, strict=True) if math.isfinite(largest)}
    scored = beams.scored_by(tree, finite)
    if len(finite) < len(ranked) and beams.scored_by(tree, ranked).keys() - scored.keys():
        return not_finite()
    return beams.advance(scored)
