"""The drafters of an engine. Whatever a drafter does wrong costs drafts: it is counted and fails no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from speculant import plugins
from speculant.cache.base import KVCache
from speculant.drafting.base import Drafter, DrafterNeeds, Method
from speculant.drafting.checks import Proposals
from speculant.drafting.checks import check_draft as check_draft
from speculant.drafting.checks import check_extends as check_extends
from speculant.drafting.guarded import GuardedDrafter
from speculant.drafting.heads.parts import HeadParts
from speculant.errors import Guard
from speculant.metrics import EngineMetrics
from speculant.types import CommittedRows, DraftTree, Request

logger = logging.getLogger(__name__)


class Drafters:
    """Drafters by method name. Each sequence has the one that its `Request.drafter` names, or none.

    drafters: those that are there from the start. default: the method of requests that name none; None = none.
    make: makes a drafter that a request names and that is not there yet; it raises ConfigError for what can't be made.
    usual_length: how many tokens a method drafts by default. absence: why there is no default method.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter] | None = None,
        default: str | None = None,
        make: Callable[[str], Drafter] | None = None,
        usual_length: Callable[[str], int] = lambda method: 1,
        absence: str = "it was made without a drafter",
    ) -> None:
        self.default, self._make, self.usual_length, self.absence = default, make, usual_length, absence
        self._guard = Guard(logger, "and the step goes on without its draft")
        self._drafters = {name: self._guarded(name, each) for name, each in (drafters or {}).items()}
        self._listening = [each for each in self._drafters.values() if each.listens]
        self.metrics = EngineMetrics()  # replaced by the engine's own

    @classmethod
    def of(cls, drafter: Drafter | None) -> Drafters:
        """Return the drafters of an engine that has one, for every request; None = none."""
        return cls() if drafter is None else cls({"default": drafter}, "default")

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The caches of all drafters."""
        return tuple(cache for each in self._drafters.values() for cache in each.drafter.caches)

    @cached_property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target layers whose hidden states a drafter asks for, in ascending order."""
        return tuple(sorted({layer for drafter in self._drafters.values() for layer in drafter.needs.hidden_layers}))

    @cached_property
    def read_successors(self) -> bool:
        """Whether a drafter asks for the target's most likely next tokens."""
        return any(drafter.needs.target_top_k for drafter in self._drafters.values())

    @property
    def known(self) -> Mapping[str, Drafter]:
        """The drafters that were made so far, by method."""
        return {method: each.drafter for method, each in self._drafters.items()}

    def tree(self, method: str) -> tuple[int, int] | None:
        """Return nodes and depth of a method's usual tree; None if it drafts chains, or its nodes have scores."""
        needs = self._drafters[method].needs if method in self._drafters else None
        if needs is None or needs.usual_nodes is None or needs.tree_depth is None:
            return None
        return needs.usual_nodes, needs.tree_depth

    def own_rows(self, method: str) -> int:
        """Return the most rows that a method adds to the target's pass below each node."""
        return self._drafters[method].needs.target_inputs if method in self._drafters else 0

    def asks_judge(self, method: str) -> bool:
        """Whether a method asks the draft-length policy which of several drafters' drafts to take."""
        return method in self._drafters and self._drafters[method].needs.asks_judge

    def __bool__(self) -> bool:
        """Whether there is any drafter."""
        return bool(self._drafters)

    def find(self, method: str) -> Drafter:
        """Return a method's drafter; raises ConfigError if it can't be made."""
        if method not in self._drafters:
            assert self._make is not None, f"nothing makes the drafter {method!r}"
            made = self._drafters[method] = self._guarded(method, self._make(method))
            self._listening += [made] if made.listens else []
            for cached in ("hidden_layers", "read_successors"):
                vars(self).pop(cached, None)
        return self._drafters[method].drafter

    def needs(self, request: Request) -> DrafterNeeds | None:
        """Return what the drafter of a sequence announces; None if it has none."""
        return None if request.drafter is None else self._drafters[request.drafter].needs

    def target_top_k(self, request: Request) -> int:
        """Return how many of the target's most likely tokens the drafter of a sequence asks for, for each row."""
        needs = self.needs(request)
        return 0 if needs is None else needs.target_top_k

    def begin(self, requests: Sequence[Request]) -> None:
        """Begin the sequences that have not begun."""
        for request in requests:
            if request.drafter is not None:
                self._drafters[request.drafter].begin(request)

    def propose(self, requests: Sequence[Request], limits: Sequence[int], vocab_size: int) -> list[DraftTree]:
        """Return a checked draft for each sequence; an empty one where there is no drafter or it fails."""
        proposed: Proposals = {}
        pairs = list(zip(requests, limits, strict=True))
        for method, drafter in self._drafters.items():
            own = [(request, limit) for request, limit in pairs if request.drafter == method]
            proposed.update(drafter.propose(own, vocab_size))
        return [proposed.get(request.seq_id, DraftTree.empty()) for request in requests]

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let drafters process what they have not seen of these sequences."""
        for method, drafter in self._drafters.items():
            drafter.catch_up([request for request in requests if request.drafter == method])

    def observe(self, request: Request, rows: Callable[[], CommittedRows]) -> None:
        """Pass on what was committed; `rows` makes it if the sequence has a drafter."""
        for drafter in self._listening:
            drafter.observe(request, rows, self.hidden_layers)

    def match_prefix(self, request: Request) -> int:
        """Return how many positions of a sequence's tokens may be taken over from the prefix index."""
        if request.drafter is None:
            return len(request.tokens)
        return self._drafters[request.drafter].match_prefix(request)

    def end(self, request: Request) -> None:
        """End a sequence if it has begun."""
        for drafter in self._drafters.values():
            drafter.end(request)

    def check(self) -> None:
        """Assert the integrity of the drafters' caches."""
        for cache in self.caches:
            cache.check()

    def _guarded(self, method: str, drafter: Drafter) -> GuardedDrafter:
        return GuardedDrafter(method, drafter, self._guard, self._count)

    def _count(self, errors: int) -> None:
        self.metrics.drafter_errors += errors


def uses_model(method: str) -> bool:
    """Whether a drafting method needs a model. Raises ConfigError for an unknown one."""
    facts: Method = plugins.load("speculant.drafting", method).METHOD
    return facts.uses_model


def head_parts(method: str) -> HeadParts | None:
    """Return the parts of the heads that a method drafts with; None = it has none. Raises ConfigError if unknown."""
    parts: HeadParts | None = getattr(plugins.load("speculant.drafting", method), "HEAD", None)
    return parts
