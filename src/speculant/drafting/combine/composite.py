"""Sub-drafters: how a user names them, and how they are built, bounded and called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant import plugins
from speculant.cache import Source
from speculant.drafting.base import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    StatelessDrafter,
    build_method,
    complete,
)
from speculant.drafting.guard import GuardedDrafter, Proposals
from speculant.drafting.methods import KIND, WITH_MODEL, installed, lookup_methods, method_facts, takes_model
from speculant.errors import ConfigError, Guard
from speculant.types import CommittedRows, Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SubDrafter:
    """A drafter within another one. usual_nodes: nodes that it proposes unless the user sets a number."""

    method: str
    drafter: Drafter
    usual_nodes: int


class CompositeDrafter(StatelessDrafter):
    """Passes every call but `propose` to its sub-drafters. Errors of one lose its own drafts alone.

    vocab_size: the target's. `errors` counts the errors of all; `count` receives their numbers too.
    """

    def __init__(
        self, sub_drafters: Sequence[SubDrafter], vocab_size: int, count: Callable[[int], None] = lambda errors: None
    ) -> None:
        guard = Guard(logger, "and the step goes on without its draft")
        self.guarded = [GuardedDrafter(each.method, each.drafter, guard, self._count) for each in sub_drafters]
        self.sub_drafters = {each.method: each.drafter for each in reversed(sub_drafters)}  # of two, the first
        self._report = count
        self.needs = combine(sub_drafters)
        overridden = type(self).observe is not CompositeDrafter.observe
        self.listens = overridden or any(each.listens for each in self.guarded)
        self.caches = tuple(cache for each in self.guarded for cache in each.drafter.caches)
        self._vocab_size = vocab_size
        self._sources: dict[int, Source] = {}  # by sequence id

    def propose_with(self, guarded: GuardedDrafter, pairs: Iterable[tuple[Request, int]]) -> Proposals:
        """Return a sub-drafter's non-empty drafts for pairs (request, limit), within its own limits too."""
        bounded = [(request, bound(guarded.drafter.needs, request, limit)) for request, limit in pairs]
        wanted = [(request, limit) for request, limit in bounded if limit > 0]
        if not wanted:
            return {}
        for request, _ in wanted:
            guarded.begin(request, self._sources.get(request.seq_id))  # one that failed has ended
        return {seq_id: tree for seq_id, tree in guarded.propose(wanted, self._vocab_size).items() if tree.size}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        for each in self.guarded:
            each.begin(request)

    def observe_source(self, request: Request, source: Source) -> None:
        """See `Drafter.observe_source`."""
        self._sources[request.seq_id] = source
        for each in self.guarded:
            each.observe_source(request, source)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        for each in self.guarded:
            each.catch_up(requests)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`; each sub-drafter gets the hidden states of its own layers."""
        for each in self.guarded:
            if each.listens:
                each.observe(request, lambda: rows, self.needs.hidden_layers)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`."""
        for each in self.guarded:
            each.roll_back(request, dropped)

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`: the least of the sub-drafters'."""
        return min(each.match_prefix(request) for each in self.guarded)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._sources.pop(request.seq_id, None)
        for each in self.guarded:
            each.end(request)

    def _count(self, errors: int) -> None:
        self.errors += errors
        self._report(errors)


def combine(sub_drafters: Sequence[SubDrafter]) -> DrafterNeeds:
    """Return the needs of a drafter that proposes one of its sub-drafters' drafts at a time."""
    needs = [each.drafter.needs for each in sub_drafters]
    return DrafterNeeds(
        max_nodes=_largest([each.max_nodes for each in needs]),
        emits_probs=any(each.emits_probs for each in needs),
        emits_tree=any(each.emits_tree for each in needs),
        usual_nodes=max(each.usual_nodes for each in sub_drafters),
        own_cache=any(each.own_cache for each in needs),
        target_cache=any(each.target_cache for each in needs),
        hidden_layers=tuple(sorted({layer for each in needs for layer in each.hidden_layers})),
        target_top_k=max(each.target_top_k for each in needs),
        reads_encoder=any(each.reads_encoder for each in needs),
        reads_prediction=any(each.reads_prediction for each in needs),
        max_positions=_largest([each.max_positions for each in needs]),
        nodes_per_beam=max(each.nodes_per_beam or 0 for each in needs) or None,
    )


def _largest(values: Sequence[int | None]) -> int | None:
    """Return the largest bound; None = unbounded."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def bound(needs: DrafterNeeds, request: Request, limit: int) -> int:
    """Return a limit cut to the number of nodes that a drafter with these needs can draft for a sequence.

    In a beam search the limit counts the nodes after the live hypotheses.
    """
    room = limit if needs.max_positions is None else needs.max_positions - request.num_positions - 1
    if request.search is not None:
        per_round = request.search.beams.width * (needs.nodes_per_beam or 0)
        return max(0, min(limit, room * per_round))
    return max(0, min(limit, room, limit if needs.max_nodes is None else needs.max_nodes))


def build_sub_drafters(context: DrafterContext, given: object) -> list[SubDrafter]:
    """Build the drafters that an option lists; None = those of `usual_methods`.

    Each is a method's name, or a mapping with the key `method`, the method's own options and, for one that drafts with
    a model, possibly a `model` of its own. Raises ConfigError.
    """
    listed = usual_methods(context.model is not None) if given is None else given
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ConfigError(f"{given!r} is not a list of drafting methods", 'give names, or mappings {"method": name}.')
    read = [read_method(each) for each in listed]
    if context.model is not None and not any(takes_model(method) for method, _ in read):
        raise ConfigError(
            f"draft model {context.model!r} is named and none of the listed methods drafts with a model",
            "leave out the model, or list a method that uses it.",
        )
    return [_build(context, method, options) for method, options in read]


def build_sub_drafter(context: DrafterContext, given: object) -> SubDrafter:
    """Build one such drafter; None = the first of the methods that look drafts up in text. Raises ConfigError."""
    return _build(context, *read_method(lookup_methods()[0] if given is None else given))


def usual_methods(with_model: bool) -> list[str]:
    """Return the methods that look drafts up in text, then the one that drafts with a model if there is a model."""
    return [*lookup_methods(), *(installed(WITH_MODEL) if with_model else [])]


def read_method(given: object) -> tuple[str, dict[str, Any]]:
    """Read a method's name, or a mapping with the key `method`; return the name and the other keys."""
    options = dict(given) if isinstance(given, Mapping) else {"method": given}
    method = options.pop("method", None)
    if not isinstance(method, str):
        raise ConfigError(f"{given!r} is not a drafting method", 'give a name, or a mapping {"method": name, ...}.')
    return method, options


def _build(context: DrafterContext, method: str, options: Mapping[str, Any]) -> SubDrafter:
    facts, options = method_facts(method), dict(options)
    model = options.pop("model", context.model) if takes_model(method) else None
    if facts.uses_model and model is None:
        raise ConfigError(f"method {method!r} drafts with a model and none is named", 'give "model" too.')
    build = plugins.load(KIND, method).build
    drafter = complete(build_method(facts, build, replace(context, options=options, model=model)))
    if drafter.needs.target_inputs:
        raise ConfigError(
            f"method {method!r} drafts in the target's own pass and can't be used within another method",
            "use it alone.",
        )
    return SubDrafter(method, drafter, drafter.needs.usual_nodes or facts.default_length)
