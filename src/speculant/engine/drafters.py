"""The drafters of an engine, each with its guard: an error of a drafter costs drafts and fails no request."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from speculant import plugins
from speculant.cache.paged import KVCache
from speculant.cache.sources import Source
from speculant.drafting.base import Drafter, DrafterNeeds, loaded
from speculant.drafting.guard import GuardedDrafter, Proposals
from speculant.drafting.heads.parts import HeadParts
from speculant.drafting.methods import KIND
from speculant.errors import Guard
from speculant.metrics import EngineMetrics
from speculant.types import CommittedRows, DraftTree, Request

logger = logging.getLogger(__name__)


class Drafters:
    """Drafters by method name. Each sequence has the one that its `Request.drafter` names, or none.

    drafters: those that exist from the start. default: the method of requests that name none; None = none.
    make: makes a drafter when a request first names it; it raises ConfigError for a method that a request can't use.
    default_length: how many tokens a method drafts unless its drafter announces a number. absence: why there is no
    default method. num_layers: the target's; a drafter that needs another layer is refused.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter] | None = None,
        default: str | None = None,
        make: Callable[[str], Drafter] | None = None,
        default_length: Callable[[str], int] = lambda method: 1,
        absence: str = "it was made without a drafter",
        num_layers: int | None = None,
    ) -> None:
        self.default, self._make, self._default_length, self.absence = default, make, default_length, absence
        self._guard, self._num_layers = Guard(logger, "and the step goes on without its draft"), num_layers
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
        return tuple(cache for each in self.known.values() for cache in each.caches)

    @cached_property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target layers whose hidden states a drafter needs, in ascending order."""
        return tuple(sorted({layer for drafter in self.known.values() for layer in drafter.needs.hidden_layers}))

    @cached_property
    def read_successors(self) -> bool:
        """Whether a drafter needs the target's most likely next tokens."""
        return any(drafter.needs.target_top_k for drafter in self.known.values())

    @cached_property
    def read_encoder(self) -> bool:
        """Whether a drafter reads the encoder's results."""
        return any(drafter.needs.reads_encoder for drafter in self.known.values())

    @property
    def known(self) -> Mapping[str, Drafter]:
        """The drafters that were made so far, by method."""
        return {method: each.drafter for method, each in self._drafters.items()}

    def tree(self, method: str) -> tuple[int, int] | None:
        """Return nodes and depth of a method's usual tree; None if it drafts chains, or its nodes have scores."""
        needs = self._needs_of(method)
        return None if needs.usual_nodes is None or needs.tree_depth is None else (needs.usual_nodes, needs.tree_depth)

    def look_ahead_rows(self, method: str) -> int:
        """Return the most look-ahead rows that a method adds to the target's pass below each node."""
        return self._needs_of(method).target_inputs

    def selects(self, method: str) -> bool:
        """Whether the draft-length policy selects between several drafters' drafts of a method."""
        return self._needs_of(method).selects

    def usual_length(self, method: str) -> int:
        """Return how many tokens a method drafts by default."""
        return self._needs_of(method).usual_nodes or self._default_length(method)

    def _needs_of(self, method: str) -> DrafterNeeds:
        return self._drafters[method].drafter.needs if method in self._drafters else DrafterNeeds()

    @property
    def listening(self) -> bool:
        """Whether a drafter observes."""
        return bool(self._listening)

    def __bool__(self) -> bool:
        """Whether there is any drafter."""
        return bool(self._drafters)

    def find(self, method: str) -> Drafter:
        """Return a method's drafter: one that was loaded within another, or a new one.

        Raises ConfigError if it can't be made.
        """
        if method not in self._drafters:
            drafter = next((within[method] for within in map(loaded, self.known.values()) if method in within), None)
            if drafter is None:
                assert self._make is not None, f"nothing makes the drafter {method!r}"
                drafter = self._make(method)
            made = self._drafters[method] = self._guarded(method, drafter)
            self._listening += [made] if made.listens else []
            for cached in ("hidden_layers", "read_successors", "read_encoder"):
                vars(self).pop(cached, None)
        return self._drafters[method].drafter

    def needs(self, request: Request) -> DrafterNeeds | None:
        """Return the needs of a sequence's drafter; None if it has none."""
        return None if request.drafter is None else self._drafters[request.drafter].drafter.needs

    def target_top_k(self, request: Request) -> int:
        """Return how many of the target's most likely tokens the drafter of a sequence needs, for each row."""
        needs = self.needs(request)
        return 0 if needs is None else needs.target_top_k

    def begin(self, requests: Sequence[Request], sources: Sequence[Source | None]) -> None:
        """Begin the sequences that have not begun; sources: theirs, which are encoded."""
        for request, source in zip(requests, sources, strict=True):
            if request.drafter is not None and request.seq_id not in self._drafters[request.drafter].begun:
                self._drafters[request.drafter].begin(request, source)

    def propose(self, requests: Sequence[Request], limits: Sequence[int], vocab_size: int) -> list[DraftTree]:
        """Return a checked draft for each sequence; an empty one where there is no drafter or it fails."""
        by_method, proposed = defaultdict[str | None, list[tuple[Request, int]]](list), Proposals()
        for request, limit in zip(requests, limits, strict=True):
            by_method[request.drafter].append((request, limit))
        for method, drafter in self._drafters.items():
            if method in by_method:
                proposed |= drafter.propose(by_method[method], vocab_size)
        return [proposed.get(request.seq_id, DraftTree.empty()) for request in requests]

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let drafters process the tokens of these sequences that they have not seen."""
        for method, drafter in self._drafters.items():
            drafter.catch_up([request for request in requests if request.drafter == method])

    def observe(self, request: Request, rows: Callable[[], CommittedRows]) -> None:
        """Pass on committed rows; `rows` makes them if the sequence has a drafter that observes."""
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
        return GuardedDrafter(method, drafter, self._guard, self._count, self._num_layers)

    def _count(self, errors: int) -> None:
        self.metrics.drafter_errors += errors


def head_parts(method: str) -> HeadParts | None:
    """Return the parts of the heads that a method drafts with; None = it has none. Raises ConfigError if unknown."""
    parts: HeadParts | None = getattr(plugins.load(KIND, method), "HEAD", None)
    return parts
