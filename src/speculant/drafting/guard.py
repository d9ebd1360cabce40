"""The guard around every drafter: its errors and illegal drafts cost drafts, are counted, and fail no request.

Composites guard their sub-drafters with it (drafting/composite.py), and the engine's drafters are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import index

from torch import Tensor

from speculant.cache import Source
from speculant.drafting.base import Drafter, is_built_in
from speculant.errors import DraftError, Guard
from speculant.types import CommittedRows, DraftTree, Request

SUM_TOLERANCE = 1e-4  # of a row of a draft's probs, which may be float32

Proposals = dict[int, DraftTree]  # by sequence id


class GuardedDrafter:
    """Calls a drafter for the sequences that have begun; no call raises an error of the drafter.

    After an error the sequence ends, and it may begin again. name: for the log. count: receives the number of errors
    after each call that had any, those within the drafter included.
    """

    def __init__(self, name: str, drafter: Drafter, guard: Guard, count: Callable[[int], None]) -> None:
        self.name, self.drafter = name, drafter
        self.begun: set[int] = set()  # the sequences that have begun and not ended
        self._guard, self._count = guard, count

    def begin(self, request: Request, source: Source | None = None) -> None:
        """Begin a sequence that has not begun; source: its own, which is encoded."""
        if request.seq_id not in self.begun and self._succeeds(self.drafter.begin, request):
            self.begun.add(request.seq_id)
            if source is not None:
                self.observe_source(request, source)

    def observe_source(self, request: Request, source: Source) -> None:
        """Pass on the source of a sequence, if the drafter announces that it reads it."""
        needs = self.drafter.needs
        if needs.reads_encoder or needs.target_cache:
            self._call(self.drafter.observe_source, request, source)

    def propose(self, pairs: Iterable[tuple[Request, int]], vocab_size: int) -> Proposals:
        """Return checked drafts for pairs (request, limit); a sequence without one has not begun or failed.

        If the drafter fails for several sequences, it is called for each alone, so that the others keep their drafts.
        """
        requests, limits, proposals = list[Request](), list[int](), Proposals()
        for request, limit in pairs:
            if request.seq_id in self.begun:
                requests.append(request)
                limits.append(limit)
        if not requests or self._succeeds(propose_checked, self.drafter, requests, limits, vocab_size, proposals):
            return proposals
        if len(requests) == 1:
            self.end(requests[0])
            return {}
        alone = [self.propose([pair], vocab_size) for pair in zip(requests, limits, strict=True)]
        return {seq_id: tree for each in alone for seq_id, tree in each.items()}

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`; after an error for each sequence alone, so that only those at fault begin again."""
        begun = [request for request in requests if request.seq_id in self.begun]
        if not begun or self._succeeds(self.drafter.catch_up, begun):
            return
        if len(begun) == 1:
            self.end(begun[0])
            return
        for request in begun:
            self.catch_up([request])

    def observe(self, request: Request, rows: CommittedRows, layers: Sequence[int]) -> None:
        """Pass on committed rows; the drafter gets the hidden states and the successors that it announces.

        layers: those of their hidden states.
        """
        needs = self.drafter.needs
        if layers != needs.hidden_layers and rows.hidden:
            rows = rows._replace(hidden=tuple(rows.hidden[layers.index(layer)] for layer in needs.hidden_layers))
        if rows.successors and len(rows.successors[0][1]) != needs.target_top_k:
            count = needs.target_top_k
            fewer = [(token, best[:count]) for token, best in rows.successors] if count else ()
            rows = rows._replace(successors=fewer)
        self._call(self.drafter.observe, request, rows)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`."""
        self._call(self.drafter.roll_back, request, dropped)

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`; from 0 to the number of tokens."""
        matched = [len(request.tokens)]
        self._succeeds(lambda: matched.append(max(0, index(self.drafter.match_prefix(request)))))
        return min(matched)

    def end(self, request: Request) -> None:
        """End a sequence if it has begun."""
        if request.seq_id in self.begun:
            self.begun.remove(request.seq_id)
            self._succeeds(self.drafter.end, request)

    def _call(self, call: Callable[..., object], request: Request, *arguments: object) -> None:
        """Make a call for a sequence that has begun, and end the sequence after an error."""
        if request.seq_id in self.begun and not self._succeeds(call, request, *arguments):
            self.end(request)

    def _succeeds(self, call: Callable[..., object], *arguments: object) -> bool:
        """Call the drafter, count its errors and return whether the call raised nothing."""
        before, succeeds = self.drafter.errors, True
        try:
            call(*arguments)
        except BaseException as error:  # noqa: BLE001 - anything but a failure is raised again
            self._guard.note(f"drafter {self.name!r}", error)
            succeeds = False
        if errors := self.drafter.errors - before + (not succeeds):
            self._count(errors)
        return succeeds


def propose_checked(
    drafter: Drafter, requests: list[Request], limits: list[int], vocab_size: int, proposals: Proposals
) -> None:
    """Add a drafter's drafts to `proposals`; raises DraftError for one that is not legal.

    The check of probs reads all of them. It is left out for this package's drafters, whose probs the contract tests
    prove.
    """
    trees, needs, drafts = drafter.propose(requests, limits), drafter.needs, Proposals()
    if len(trees) != len(requests):
        raise DraftError(f"{len(trees)} drafts came for {len(requests)} sequences", "return one for each.")
    for request, limit, tree in zip(requests, limits, trees, strict=True):
        if request.search is None:
            check_draft(tree, limit, vocab_size, needs.emits_tree)
            if tree.ahead is not None:
                check_ahead(tree, min(limit, needs.target_inputs))
        else:
            live = request.search.beams.live_tree
            check_draft(tree, live.size + limit, vocab_size, branches=True)
            check_extends(tree, live)
        if tree.probs is not None and tree.size and not is_built_in(drafter):
            check_probs(tree, tree.probs)
        drafts[request.seq_id] = tree
    proposals.update(drafts)


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
    """Raise DraftError unless a draft with look-ahead rows has 1 to `most` of them below each node."""
    if tree.ahead is not None and not (tree.ahead.ndim == 2 and 0 < len(tree.ahead) <= most):
        raise DraftError(
            f"a draft has look-ahead rows of shape {list(tree.ahead.shape)}, and {most} are allowed below each node",
            "announce them as target_inputs, and add no more of them than the limit on nodes.",
        )


def _are_shares(scores: Sequence[float]) -> bool:
    return min(scores) >= 0 and max(scores) <= 1 and not math.isnan(sum(scores))


def check_probs(tree: DraftTree, probs: Tensor) -> None:
    """Raise DraftError unless each row is a distribution in which the node's own token is possible."""
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
