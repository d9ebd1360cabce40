"""The drafters of an engine. Whatever a drafter does wrong costs drafts: it is counted and fails no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import index

from torch import Tensor

from speculant.cache.base import KVCache
from speculant.drafting.base import Drafter, DrafterNeeds, complete, is_built_in, listens
from speculant.errors import DraftError, Guard
from speculant.metrics import EngineMetrics
from speculant.types import CommittedRows, DraftTree, Request

logger = logging.getLogger(__name__)

SUM_TOLERANCE = 1e-4  # of a row of a draft's probs, which may be float32

Proposals = dict[int, DraftTree]  # by sequence id


class Drafters:
    """Drafters by method name. Each sequence has the one that its `Request.drafter` names, or none.

    drafters: those that are there from the start. default: the method of requests that name none; None = none.
    make: makes a drafter that a request names and that is not there yet; it raises ConfigError for what can't be made.
    usual_length: how many tokens a method drafts by default.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter] | None = None,
        default: str | None = None,
        make: Callable[[str], Drafter] | None = None,
        usual_length: Callable[[str], int] = lambda method: 1,
    ) -> None:
        self._drafters, self.default = {name: complete(each) for name, each in (drafters or {}).items()}, default
        self._make, self.usual_length = make, usual_length
        self._begun: dict[int, Drafter] = {}
        self._guard = Guard(logger, "and the step goes on without its draft")
        self.metrics = EngineMetrics()  # replaced by the engine's own

    @classmethod
    def of(cls, drafter: Drafter | None) -> Drafters:
        """Return the drafters of an engine that has one, for every request; None = none."""
        return cls() if drafter is None else cls({"default": drafter}, "default")

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The caches of all drafters."""
        return tuple(cache for drafter in self._drafters.values() for cache in drafter.caches)

    @cached_property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target layers whose hidden states a drafter asks for, in ascending order."""
        return tuple(sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.hidden_layers}))

    def __bool__(self) -> bool:
        """Whether there is any drafter."""
        return bool(self._drafters)

    def find(self, method: str) -> Drafter:
        """Return a method's drafter; raises ConfigError if it can't be made."""
        if method not in self._drafters:
            assert self._make is not None, f"nothing makes the drafter {method!r}"
            self._drafters[method] = complete(self._make(method))
            vars(self).pop("hidden_layers", None)
        return self._drafters[method]

    def needs(self, request: Request) -> DrafterNeeds | None:
        """Return what the drafter of a sequence announces; None if it has none."""
        return None if request.drafter is None else self._drafters[request.drafter].needs

    def begin(self, requests: Sequence[Request]) -> None:
        """Begin the sequences that have not begun."""
        for request in requests:
            if request.drafter is not None and request.seq_id not in self._begun:
                drafter = self._drafters[request.drafter]
                if self._succeeds(request.drafter, partial(drafter.begin, request)):
                    self._begun[request.seq_id] = drafter

    def propose(self, requests: Sequence[Request], limits: Sequence[int], vocab_size: int) -> list[DraftTree]:
        """Return a checked draft for each sequence; an empty one where there is no drafter or it fails."""
        proposed: Proposals = {}
        pairs = list(zip(requests, limits, strict=True))
        for method, drafter in self._drafters.items():
            own = [(request, limit) for request, limit in pairs if self._has_begun(request, method)]
            if own:
                proposed.update(self._propose_with(method, drafter, own, vocab_size))
        return [proposed.get(request.seq_id, DraftTree.empty()) for request in requests]

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let drafters process what they have not seen of these sequences."""
        for method, drafter in self._drafters.items():
            own = [request for request in requests if self._has_begun(request, method)]
            if own:
                self._catch_up_with(method, drafter, own)

    def observe(self, request: Request, rows: Callable[[], CommittedRows]) -> None:
        """Pass on what was committed; `rows` makes it if the sequence has a drafter."""
        drafter = self._begun.get(request.seq_id)
        if (
            drafter is not None
            and listens(drafter)
            and not self._succeeds(
                str(request.drafter), lambda: drafter.observe(request, self._own_layers(drafter, rows()))
            )
        ):
            self._restart([request])

    def _own_layers(self, drafter: Drafter, rows: CommittedRows) -> CommittedRows:
        """Return rows with the hidden states of the layers that a drafter announces."""
        if not rows.hidden:
            return rows
        layers = self.hidden_layers
        return replace(rows, hidden=tuple(rows.hidden[layers.index(layer)] for layer in drafter.needs.hidden_layers))

    def match_prefix(self, request: Request) -> int:
        """Return how many positions of a sequence's tokens may be taken over from the prefix index."""
        matched = [len(request.tokens)]
        if request.drafter is not None:
            drafter = self._drafters[request.drafter]
            self._succeeds(request.drafter, lambda: matched.append(max(0, index(drafter.match_prefix(request)))))
        return min(matched)

    def end(self, request: Request) -> None:
        """End a sequence if it has begun."""
        drafter = self._begun.pop(request.seq_id, None)
        if drafter is not None:
            self._succeeds(str(request.drafter), lambda: drafter.end(request))

    def check(self) -> None:
        """Assert the integrity of the drafters' caches."""
        for cache in self.caches:
            cache.check()

    def _has_begun(self, request: Request, method: str) -> bool:
        return request.drafter == method and request.seq_id in self._begun

    def _restart(self, requests: Sequence[Request]) -> None:
        """End sequences after an error; they begin anew in the next step."""
        for request in requests:
            self.end(request)

    def _catch_up_with(self, method: str, drafter: Drafter, requests: Sequence[Request]) -> None:
        """Let one drafter catch up; if that fails, for each sequence alone, so that only those at fault restart."""
        if self._succeeds(method, partial(drafter.catch_up, requests)):
            return
        if len(requests) == 1:
            self._restart(requests)
            return
        for request in requests:
            self._catch_up_with(method, drafter, [request])

    def _propose_with(
        self, method: str, drafter: Drafter, pairs: Sequence[tuple[Request, int]], vocab_size: int
    ) -> Proposals:
        """Ask one drafter; if that fails, ask it for each sequence alone, so that the others keep their drafts."""
        proposals: Proposals = {}
        if self._succeeds(method, lambda: proposals.update(checked_drafts(drafter, pairs, vocab_size))):
            return proposals
        if len(pairs) == 1:
            self._restart([pairs[0][0]])
            return {}
        alone = [self._propose_with(method, drafter, [pair], vocab_size) for pair in pairs]
        return {seq_id: tree for each in alone for seq_id, tree in each.items()}

    def _succeeds(self, method: str, call: Callable[[], object]) -> bool:
        """Make a call of a drafter; count an error and say whether there was none."""
        succeeds = self._guard.succeeds(f"drafter {method!r}", call)
        self.metrics.drafter_errors += not succeeds
        return succeeds


def checked_drafts(drafter: Drafter, pairs: Sequence[tuple[Request, int]], vocab_size: int) -> Proposals:
    """Return a drafter's proposals for sequences with a limit each; raises DraftError if one breaks the contract."""
    trees = drafter.propose([request for request, _ in pairs], [limit for _, limit in pairs])
    if len(trees) != len(pairs):
        raise DraftError(f"{len(trees)} drafts came for {len(pairs)} sequences", "return one for each.")
    foreign = not is_built_in(drafter)
    for (request, limit), tree in zip(pairs, trees, strict=True):
        if request.search is None:
            check_draft(tree, limit, vocab_size, drafter.needs.emits_tree)
        else:
            live = request.search.beams.live_tree
            check_draft(tree, live.size + limit, vocab_size, branches=True)
            check_extends(tree, live)
        if foreign and tree.size and tree.probs is not None:
            check_probs(tree, tree.probs)
    return {request.seq_id: tree for (request, _), tree in zip(pairs, trees, strict=True)}


def check_draft(tree: DraftTree, most: int, vocab_size: int, branches: bool) -> None:
    """Raise DraftError unless a draft keeps to the contract of `Drafter.propose`.

    most: the nodes it may have. branches: whether it may have siblings.
    """
    if not isinstance(tree, DraftTree):
        raise DraftError(f"a draft is a {type(tree).__name__}", "return a DraftTree.")
    if tree.size == 0:
        return
    tokens, parents = tree.token_list, tree.parent_list
    if len(tokens) != len(parents) or len(tokens) > most:
        raise DraftError(
            f"a draft has {len(tokens)} tokens and {len(parents)} parents for a limit of {most} nodes",
            "stay within the limit.",
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise DraftError(
            f"a draft has the tokens {min(tokens)} to {max(tokens)} of a vocabulary of {vocab_size}", "use known ids."
        )
    if not all(-1 <= parent < node for node, parent in enumerate(parents)):
        raise DraftError("a draft has a node before its parent", "put parents before their children.")
    if not (branches or tree.is_chain):
        raise DraftError("a draft branches and the drafter did not announce it", "set emits_tree in its needs.")
    if tree.probs is not None and tuple(tree.probs.shape) != (tree.size, vocab_size):
        raise DraftError(
            f"a draft of {tree.size} nodes has probs of shape {list(tree.probs.shape)}",
            f"give [{tree.size}, {vocab_size}], one row per node.",
        )


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
