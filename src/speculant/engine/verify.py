"""From a pass's logits to the verdict on each draft.

A row of logits may not give a distribution. After a committed token, this is an error of the request. After a drafted
node, the nodes below it are dropped. The node itself may be accepted, since its parent's row decides that; the verdict
then ends with it, and the next pass computes the same row after a committed token. So an output ends where it would end
without a draft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from speculant.beams import Beams
from speculant.engine.runner import TargetOutput
from speculant.errors import RequestError, SpeculantError
from speculant.kernels.base import Sampler
from speculant.sampling.chance import Chance, Chances
from speculant.sampling.distribution import Node, distribution, row_maxima
from speculant.sampling.rows import rank
from speculant.types import DraftTree, Request, Verdict
from speculant.verification.base import Verifier

Decision = Verdict | Beams | SpeculantError  # `Beams` of an advanced search; an error ends that request alone


def verify(
    outputs: Sequence[TargetOutput],
    logits: Tensor,
    verifiers: Mapping[str, Verifier],
    chances: Chances,
    sampler: Sampler,
) -> dict[int, Decision]:
    """Return the decision on each output that has logits, by sequence id.

    logits: those of all outputs in order. Their distributions are made at once, then each draft is verified.
    """
    chosen, nodes = list[tuple[TargetOutput, Verifier]](), list[Node]()
    for output in outputs:
        if output.logits is not None:
            verifier = verifier_for(verifiers[output.item.request.verifier], output.item.request)
            chosen.append((output, verifier))
            nodes += _nodes(output, verifier)
    if not chosen:
        return {}
    probs = distribution(logits, nodes, sampler)
    maxima = row_maxima(probs)
    decisions, first = dict[int, Decision](), 0
    for output, verifier in chosen:
        end = first + len(output.nodes)
        own = probs if len(chosen) == 1 else probs[first:end]  # a view takes microseconds
        decisions[output.item.request.seq_id] = _decide(output, verifier, own, maxima[first:end], chances)
        first = end
    return decisions


def choose_verifier(request: Request, deterministic: bool, branches: bool = False) -> str:
    """Return a verifier's name: match for a seeded or greedy request or a deterministic draft.

    For sampled drafts it is the lossless verifier that accepts most: block for a chain, traversal for a tree.
    """
    if request.params.seed is not None or request.params.greedy or deterministic:
        return "match"
    return "traversal" if branches else "block"


def verifier_for(verifier: Verifier, request: Request) -> Verifier:
    """Return the verifier of a request's drafts where `verifier` was chosen."""
    return verifier.needs.greedy or verifier if request.params.greedy else verifier


def _nodes(output: TargetOutput, verifier: Verifier) -> list[Node]:
    """Return the `Node` of each row; rows share one if drafted tokens before them have no effect."""
    request, tree = output.item.request, output.tree
    if request.constraint is None and not request.params.edits:
        return [Node(request, (), verifier.needs.softened)] * len(output.nodes)
    return [Node(request, tree.tokens_to(node), verifier.needs.softened) for node in output.nodes]


def _decide(
    output: TargetOutput, verifier: Verifier, probs: Tensor, maxima: Sequence[float], chances: Chances
) -> Decision:
    request, tree = output.item.request, output.tree
    if request.search is not None:
        return advance_sound(request.search.beams, tree, output.nodes, probs, maxima)
    if not 0 < maxima[0] < math.inf:
        return failure_of(maxima[0])
    return verify_sound(verifier, tree, probs, maxima, chances.verify(request))


def failure_of(largest: float) -> SpeculantError:
    """Return the error of a row that is not a distribution; its largest entry is 0 or NaN."""
    if largest == 0:
        return RequestError(
            "no token is possible: all are banned by the constraint, bad_words, allowed_token_ids, logit_bias or"
            " min_tokens, or by the model itself",
            "allow at least one token in every place.",
        )
    return not_finite()


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
        if node in failed:  # it is a leaf now, and the draw from its row is not used
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
