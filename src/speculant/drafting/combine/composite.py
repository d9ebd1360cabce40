"""Drafters within a drafter: how a user names them, and how they are built, bounded and called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant import plugins
from speculant.drafting.base import Drafter, DrafterContext, DrafterNeeds, Method, StatelessDrafter, complete
from speculant.drafting.checks import Proposals
from speculant.drafting.guarded import GuardedDrafter
from speculant.errors import ConfigError, Guard
from speculant.types import CommittedRows, Request

logger = logging.getLogger(__name__)

KIND = "speculant.drafting"


@dataclass(frozen=True)
class Member:
    """A drafter within another one. usual_nodes: nodes that it proposes unless the user sets a number."""

    method: str
    drafter: Drafter
    usual_nodes: int


class CompositeDrafter(StatelessDrafter):
    """Passes every call but `propose` to its members. An error of one costs its own drafts and counts in `errors`.

    vocab_size: the target's; members' drafts are checked as the engine checks drafts. count: receives numbers of errors
    too.
    """

    def __init__(
        self, members: Sequence[Member], vocab_size: int, count: Callable[[int], None] = lambda errors: None
    ) -> None:
        guard = Guard(logger, "and the step goes on without its draft")
        self.members = [GuardedDrafter(each.method, each.drafter, guard, self._count) for each in members]
        self._report = count
        self.needs = combine(members)
        self.caches = tuple(cache for each in members for cache in each.drafter.caches)
        self._vocab_size = vocab_size

    def ask(self, member: GuardedDrafter, pairs: Iterable[tuple[Request, int]]) -> Proposals:
        """Return a member's non-empty drafts for pairs (request, limit), within its own limits too."""
        bounded = [(request, bound(member.needs, request, limit)) for request, limit in pairs]
        wanted = [(request, limit) for request, limit in bounded if limit > 0]
        for request, _ in wanted:
            member.begin(request)  # one that failed has ended
        return {seq_id: tree for seq_id, tree in member.propose(wanted, self._vocab_size).items() if tree.size}

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        for member in self.members:
            member.begin(request)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        for member in self.members:
            member.catch_up(requests)

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`; each member gets the hidden states of its own layers."""
        for member in self.members:
            if member.listens:
                member.observe(request, lambda: rows, self.needs.hidden_layers)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`."""
        for member in self.members:
            member.roll_back(request, dropped)

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`: the least of the members'."""
        return min(member.match_prefix(request) for member in self.members)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        for member in self.members:
            member.end(request)

    def _count(self, errors: int) -> None:
        self.errors += errors
        self._report(errors)


def combine(members: Sequence[Member]) -> DrafterNeeds:
    """Return the needs of a drafter that proposes one of its members' drafts at a time."""
    needs = [member.drafter.needs for member in members]
    return DrafterNeeds(
        max_nodes=_largest([each.max_nodes for each in needs]),
        emits_probs=any(each.emits_probs for each in needs),
        emits_tree=any(each.emits_tree for each in needs),
        usual_nodes=max(member.usual_nodes for member in members),
        own_cache=any(each.own_cache for each in needs),
        hidden_layers=tuple(sorted({layer for each in needs for layer in each.hidden_layers})),
        target_top_k=max(each.target_top_k for each in needs),
        reads_prediction=any(each.reads_prediction for each in needs),
        max_positions=_largest([each.max_positions for each in needs]),
        nodes_per_beam=max(each.nodes_per_beam or 0 for each in needs) or None,
    )


def _largest(values: Sequence[int | None]) -> int | None:
    """Return the largest bound; None = unbounded."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def bound(needs: DrafterNeeds, request: Request, limit: int) -> int:
    """Return a limit cut to what a drafter with these needs can draft for a sequence.

    In a beam search it counts the nodes behind the live hypotheses: so many per beam and round.
    """
    room = limit if needs.max_positions is None else needs.max_positions - request.num_positions - 1
    if request.search is not None:
        per_round = request.search.beams.width * (needs.nodes_per_beam or 0)
        return max(0, min(limit, room * per_round))
    return max(0, min(limit, room, limit if needs.max_nodes is None else needs.max_nodes))


def build_members(context: DrafterContext, given: object) -> list[Member]:
    """Build the drafters that an option lists; None = those of `usual_methods`.

    Each is a method's name, or a mapping with the key `method`, the method's own options and, for one that drafts with
    a model, possibly a `model` of its own. Raises ConfigError.
    """
    listed = usual_methods(context.model is not None) if given is None else given
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ConfigError(f"{given!r} is not a list of drafting methods", 'give names, or mappings {"method": name}.')
    read = [read_member(each) for each in listed]
    if context.model is not None and not any(_drafts_with_model(method) for method, _ in read):
        raise ConfigError(
            f"draft model {context.model!r} is named and none of the listed methods drafts with a model",
            "leave out the model, or list a method that uses it.",
        )
    return [_build(context, method, options) for method, options in read]


def build_member(context: DrafterContext, given: object) -> Member:
    """Build one such drafter; None = the first of `usual_methods` without a model. Raises ConfigError."""
    return _build(context, *read_member(usual_methods(with_model=False)[0] if given is None else given))


def usual_methods(with_model: bool) -> list[str]:
    """Return the methods with a `lookup_rank` in its order, then the preferred one if there is a model for it."""
    methods = {name: _method(name) for name in plugins.names(KIND)}
    ranked = sorted((each.lookup_rank, name) for name, each in methods.items() if each.lookup_rank is not None)
    if not ranked:
        raise ConfigError("no installed drafting method looks drafts up in text", "name the methods to use.")
    preferred = [name for name, each in methods.items() if each.preferred and with_model]
    return [*(name for _, name in ranked), *preferred]


def read_member(given: object) -> tuple[str, dict[str, Any]]:
    """Read a method's name, or a mapping with the key `method`; return the name and the other keys."""
    options = dict(given) if isinstance(given, Mapping) else {"method": given}
    method = options.pop("method", None)
    if not isinstance(method, str):
        raise ConfigError(f"{given!r} is not a drafting method", 'give a name, or a mapping {"method": name, ...}.')
    return method, options


def _build(context: DrafterContext, method: str, options: Mapping[str, Any]) -> Member:
    facts, options = _method(method), dict(options)
    model = options.pop("model", context.model) if _drafts_with_model(method) else None
    if facts.uses_model and model is None:
        raise ConfigError(f"method {method!r} drafts with a model and none is named", 'give "model" too.')
    build: Callable[[DrafterContext], object] = plugins.load(KIND, method).build
    drafter = complete(build(replace(context, options=options, model=model)))
    if drafter.needs.target_inputs:
        raise ConfigError(
            f"method {method!r} drafts in the target's own pass and can't be used within another method",
            "use it alone.",
        )
    return Member(method, drafter, drafter.needs.usual_nodes or facts.default_length)


def _drafts_with_model(method: str) -> bool:
    return _method(method).uses_model or _method(method).accepts_model


def _method(name: str) -> Method:
    method: Method = plugins.load(KIND, name).METHOD
    return method
