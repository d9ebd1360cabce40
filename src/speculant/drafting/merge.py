"""Several drafters' proposals in one tree, verified in one pass.

Common prefixes are shared. A draft's nodes are likeliest first: the limit keeps the nodes with the highest estimated
survival, which is the product of the scores down to a node. Where sub-drafters agree the highest score counts, and a
draft without scores has 0.5 everywhere. So drafts without scores are cut level by level, in the order of the
sub-drafters. Siblings are in the order of the sub-drafters.

Verification stays exact because only drafts that are deterministic under the request's rule are merged. A merged tree
has no probs, so requests are verified by `match`, under which any draft is deterministic given the shared noise, a
draft model's too. Under a ratio rule that the user names, sub-drafters that emit probs are left out.

Memory: the drafters'. Cost: all drafters, 10 microseconds per sequence and drafter, and 4 per node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from speculant.drafting.base import DrafterContext, Method, read_options
from speculant.drafting.composite import CompositeDrafter, SubDrafter, build_sub_drafters
from speculant.tree import depths_of
from speculant.types import DraftTree, Request

METHOD = Method(default_length=8, accepts_model=True, varies=True)
UNKNOWN_SCORE = 0.5  # of a node whose drafter gives none
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MergeOptions:
    """members: the sub-drafters in order, by name or as mappings with `method` and its options.

    None = every method that looks drafts up in text, and the one that drafts with a model if a model is named.
    """

    members: Any = None


class MergeDrafter(CompositeDrafter):
    """See the module's docstring."""

    def __init__(self, sub_drafters: Sequence[SubDrafter], vocab_size: int) -> None:
        super().__init__(sub_drafters, vocab_size)
        most = [each.drafter.needs.max_nodes for each in sub_drafters]
        self.needs = replace(
            self.needs,
            max_nodes=None if None in most else sum(each or 0 for each in most),
            usual_nodes=sum(each.usual_nodes for each in sub_drafters),
            emits_probs=False,
            emits_tree=self.needs.emits_tree or len(sub_drafters) > 1,
            nodes_per_beam=None,
        )
        self._warned = False

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        merges = {request.seq_id: Merge() for request in requests}
        pairs = list(zip(requests, limits, strict=True))
        for guarded in self.guarded:
            draws = guarded.drafter.needs.emits_probs
            merged = [(request, limit) for request, limit in pairs if not (draws and self._needs_probs(request))]
            for seq_id, tree in self.propose_with(guarded, merged).items():
                merges[seq_id].add(tree)
        return [merges[request.seq_id].tree(limit) for request, limit in pairs]

    def _needs_probs(self, request: Request) -> bool:
        """Whether a ratio rule would need the probs of a request's drawn drafts; warns once."""
        if request.drafts.shared_noise:
            return False
        if not self._warned:
            self._warned = True
            logger.warning(
                'drafts that are drawn are not merged under verification %r; use "match" for them',
                request.drafts.verifier,
            )
        return True


@dataclass
class Merge:
    """The nodes of several drafts for one sequence; a parent comes before its children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    _nodes: dict[tuple[int, int], int] = field(default_factory=dict)  # by parent and token

    def add(self, draft: DraftTree) -> None:
        """Add a draft's nodes; where the tree has one already, the higher score counts."""
        places: list[int] = []
        scores: Iterable[float | None] = [None] * draft.size if draft.scores is None else draft.scores
        for token, parent, score in zip(draft.token_list, draft.parent_list, scores, strict=True):
            places.append(self._add_node(token, places[parent] if parent >= 0 else -1, score))

    def _add_node(self, token: int, parent: int, score: float | None) -> int:
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.scores.append(score)
        elif score is not None:
            self.scores[node] = max(score, self.scores[node] or 0.0)
        return node

    def tree(self, limit: int) -> DraftTree:
        """Return the tree of the `limit` nodes with the highest estimated survival, in the order they were added."""
        scores = [UNKNOWN_SCORE if score is None else score for score in self.scores]
        known = None if all(score is None for score in self.scores) else scores
        whole = DraftTree.of(self.tokens, self.parents, scores=known)
        return whole.only(best_nodes(self.parents, scores, limit))


def best_nodes(parents: Sequence[int], scores: Sequence[float], limit: int) -> list[int]:
    """Return, in ascending order, the nodes with the highest product of scores; each one's parent is among them.

    Ties go to the lower depth, then to the earlier node.
    """
    survival: list[float] = []
    for parent, score in zip(parents, scores, strict=True):
        survival.append(score * (survival[parent] if parent >= 0 else 1.0))
    depths = depths_of(parents)
    ranked = sorted(range(len(parents)), key=lambda node: (-survival[node], depths[node], node))
    return sorted(ranked[:limit])


def build(context: DrafterContext) -> MergeDrafter:
    """Build the sub-drafters."""
    return MergeDrafter(
        build_sub_drafters(context, read_options(context, MergeOptions).members), context.target.vocab_size
    )
