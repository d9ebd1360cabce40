"""Checks of drafts: whatever a drafter proposes, only trees that keep to the contract get any further."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from speculant.drafting.base import Drafter, is_built_in
from speculant.errors import DraftError
from speculant.types import DraftTree, Request

SUM_TOLERANCE = 1e-4  # of a row of a draft's probs, which may be float32

Proposals = dict[int, DraftTree]  # by sequence id


def checked_drafts(drafter: Drafter, pairs: Sequence[tuple[Request, int]], vocab_size: int) -> Proposals:
    """Return a drafter's proposals for sequences with a limit each; raises DraftError if one breaks the contract."""
    trees = drafter.propose([request for request, _ in pairs], [limit for _, limit in pairs])
    if len(trees) != len(pairs):
        raise DraftError(f"{len(trees)} drafts came for {len(pairs)} sequences", "return one for each.")
    for (request, limit), tree in zip(pairs, trees, strict=True):
        if request.search is None:
            check_draft(tree, limit, vocab_size, drafter.needs.emits_tree)
            check_ahead(tree, min(limit, drafter.needs.target_inputs))
        else:
            live = request.search.beams.live_tree
            check_draft(tree, live.size + limit, vocab_size, branches=True)
            check_extends(tree, live)
        if tree.probs is not None and tree.size and not is_built_in(drafter):
            check_probs(tree, tree.probs)
    return {request.seq_id: tree for (request, _), tree in zip(pairs, trees, strict=True)}


def check_draft(tree: DraftTree, most: int, vocab_size: int, branches: bool) -> None:
    """Raise DraftError unless a draft keeps to the contract of `Drafter.propose`.

    most: the nodes it may have. branches: whether it may have siblings.
    """
    if not isinstance(tree, DraftTree):
        raise DraftError(f"a draft is a {type(tree).__name__}", "return a DraftTree.")
    tokens, parents = tree.token_list, tree.parent_list
    if not tokens and not parents and tree.size == 0:
        return
    if tree.size != len(tokens) or len(tokens) != len(parents) or len(tokens) > most:
        raise DraftError(
            f"a draft has {len(tokens)} tokens and {len(parents)} parents for a limit of {most} nodes",
            "stay within the limit.",
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise DraftError(
            f"a draft has the tokens {min(tokens)} to {max(tokens)} of a vocabulary of {vocab_size}", "use known ids."
        )
    is_chain = parents == list(range(-1, len(parents) - 1))
    if is_chain != tree.is_chain:
        raise DraftError("a draft was changed after it was made", "make a new DraftTree instead.")
    if not is_chain:
        if not all(-1 <= parent < node for node, parent in enumerate(parents)):
            raise DraftError("a draft has a node before its parent", "put parents before their children.")
        if not branches:
            raise DraftError("a draft branches and the drafter did not announce it", "set emits_tree in its needs.")
    if tree.scores is not None and not (len(tree.scores) == tree.size and _are_shares(tree.scores)):
        raise DraftError(
            f"a draft of {tree.size} nodes has the scores {tree.scores!r}", "give one from 0 to 1 for each."
        )
    if tree.probs is not None and tuple(tree.probs.shape) != (tree.size, vocab_size):
        raise DraftError(
            f"a draft of {tree.size} nodes has probs of shape {list(tree.probs.shape)}",
            f"give [{tree.size}, {vocab_size}], one row per node.",
        )


def check_ahead(tree: DraftTree, most: int) -> None:
    """Raise DraftError for a draft with more rows of the drafter's own at a place than `most`, or with none of them."""
    if tree.ahead is not None and not (tree.ahead.ndim == 2 and 0 < len(tree.ahead) <= most):
        raise DraftError(
            f"a draft has own rows of shape {list(tree.ahead.shape)} where {most} are allowed below each node",
            "announce them as target_inputs, and add no more of them than nodes are asked for.",
        )


def _are_shares(scores: Sequence[float]) -> bool:
    return min(scores) >= 0 and max(scores) <= 1 and not math.isnan(sum(scores))


def check_probs(tree: DraftTree, probs: Tensor) -> None:
    """Raise DraftError unless each row is a distribution that gives the node's own token a chance.

    It reads all probs, so drafters of this package are not asked: the contract tests prove what theirs are.
    """
    if not probs.is_floating_point():
        raise DraftError(f"a draft has probs of type {probs.dtype}", "give floating-point numbers.")
    totals: list[float] = probs.sum(-1).tolist()
    if not all(abs(total - 1) <= SUM_TOLERANCE for total in totals) or probs.min().item() < 0:
        raise DraftError(
            "a draft has probs that are not distributions", "give the distribution that each token was drawn from."
        )
    if not probs.gather(1, tree.tokens.to(probs.device).unsqueeze(1)).min().item() > 0:
        raise DraftError(
            "a draft has a token of probability 0", "give the distribution that each token was drawn from."
        )


def check_extends(tree: DraftTree, live: DraftTree) -> None:
    """Raise DraftError unless a beam search's draft is empty or begins with the tree of its live hypotheses."""
    if tree.size and (
        tree.token_list[: live.size] != live.token_list or tree.parent_list[: live.size] != live.parent_list
    ):
        raise DraftError("a draft of a beam search does not begin with its live hypotheses", "extend `live_tree`.")
