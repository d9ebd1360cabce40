"""Drafters that consist of others: one fan-out, which passes each call on to the guarded sub-drafters.

A method that combines others calls all of them. The engine's drafter is a composite that routes by request: each
sequence has the sub-drafter of its own method. An error of a sub-drafter costs its own drafts and fails no request.

A guard stands around every sub-drafter: its errors and illegal drafts cost drafts, are counted, and fail no request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import override

from speculant import plugins
from speculant.cache import KVCache, Source
from speculant.drafting.base import (
    Drafter,
    DrafterContext,
    DrafterNeeds,
    DrafterReads,
    Selector,
    StatelessDrafter,
    build_method,
    complete,
    is_built_in,
)
from speculant.drafting.methods import KIND, WITH_MODEL, installed, lookup_methods, method_facts, takes_model
from speculant.errors import ConfigError, DraftError, Guard
from speculant.metrics import EngineMetrics
from speculant.types import CommittedRows, DraftPrice, DraftTree, Request

logger = logging.getLogger(__name__)

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
        if needs.reads.encoder or needs.reads.target_cache:
            self._call(self.drafter.observe_source, request, source)

    def propose(
        self, pairs: Iterable[tuple[Request, int]], vocab_size: int, selector: Selector | None = None
    ) -> Proposals:
        """Return checked drafts for pairs (request, limit), without empty ones.

        A sequence that has not begun, or that failed, has none. selector: see `Drafter.propose_selected`.

        If the drafter fails for several sequences, it is called for each alone, so that the others keep their drafts.
        """
        requests, limits, proposals = list[Request](), list[int](), Proposals()
        for request, limit in pairs:
            if request.seq_id in self.begun:
                requests.append(request)
                limits.append(limit)
        arguments = self.drafter, requests, limits, vocab_size, proposals, selector
        if not requests or self._succeeds(propose_checked, *arguments):
            return proposals
        if len(requests) == 1:
            self.end(requests[0])
            return {}
        alone = [self.propose([pair], vocab_size, selector) for pair in zip(requests, limits, strict=True)]
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

        layers: of the target, whose hidden states the rows have.
        """
        needs = self.drafter.needs
        if layers != needs.hidden_layers and rows.hidden:
            rows = rows._replace(hidden=tuple(rows.hidden[layers.index(layer)] for layer in needs.hidden_layers))
        if rows.successors and len(rows.successors[0][1]) != needs.reads.top_k:
            count = needs.reads.top_k
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
    drafter: Drafter,
    requests: list[Request],
    limits: list[int],
    vocab_size: int,
    proposals: Proposals,
    selector: Selector | None = None,
) -> None:
    """Add a drafter's drafts that are not empty to `proposals`; raises DraftError for one that is not legal.

    The check of probs reads all of them. It is left out for this package's drafters, whose probs the contract tests
    prove.
    """
    needs, drafts = drafter.needs, Proposals()
    trees = drafter.propose_selected(requests, limits, selector) if needs.selects else drafter.propose(requests, limits)
    if len(trees) != len(requests):
        raise DraftError(f"{len(trees)} drafts came for {len(requests)} sequences", "return one for each.")
    for request, limit, tree in zip(requests, limits, trees, strict=True):
        if request.search is None:
            check_draft(tree, limit, vocab_size, needs.emits_tree)
            if tree.num_rows > tree.size:
                tree.check_rows(min(limit, needs.target_inputs))
        else:
            live = request.search.beams.live_tree
            check_draft(tree, live.size + limit, vocab_size, branches=True)
            check_extends(tree, live)
        if tree.probs is not None and tree.size and not is_built_in(drafter):
            check_probs(tree, tree.probs)
        if tree.num_rows:
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
    scores = tree.scores
    if scores is not None and not (
        len(scores) == tree.size and min(scores) >= 0 and max(scores) <= 1 and not math.isnan(sum(scores))
    ):
        raise DraftError(f"a draft of {tree.size} nodes has the scores {scores!r}", "give one from 0 to 1 for each.")
    if tree.probs is not None and tuple(tree.probs.shape) != (tree.size, vocab_size):
        raise DraftError(
            f"a draft of {tree.size} nodes has probs of shape {list(tree.probs.shape)}",
            f"give [{tree.size}, {vocab_size}], one row per node.",
        )


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


@dataclass(frozen=True)
class SubDrafter:
    """A drafter within another one. usual_nodes: nodes that it proposes unless the user sets a number."""

    method: str
    drafter: Drafter
    usual_nodes: int

    @classmethod
    def of(cls, method: str, made: object, default_length: int, num_layers: int | None = None) -> SubDrafter:
        """Return a drafter with the calls that it lacks; num_layers: see `complete`."""
        drafter = complete(made, num_layers)
        return cls(method, drafter, drafter.needs.usual_nodes or default_length)


Routes = Iterable[tuple[GuardedDrafter, Sequence[Request]]]  # sub-drafters, each with its own requests


class CompositeDrafter(StatelessDrafter):
    """Passes every call but `propose` to the sub-drafters of a request: to all, unless `route` says otherwise.

    vocab_size: the target's. `errors` counts the errors of all.
    """

    listens = False

    def __init__(self, sub_drafters: Sequence[SubDrafter], vocab_size: int) -> None:
        self._guard = Guard(logger, "and the step goes on without its draft")
        self._listed, self._vocab_size = list[SubDrafter](), vocab_size
        self.guarded = list[GuardedDrafter]()
        self._sources: dict[int, Source] = {}  # by sequence id
        self.add(*sub_drafters)

    def add(self, *added: SubDrafter) -> None:
        """Add sub-drafters; of two of a method, the first counts as the drafter of the method."""
        for each in added:
            self._listed.append(each)
            self.guarded.append(GuardedDrafter(each.method, each.drafter, self._guard, self.count))
        self.sub_drafters = {each.method: each.drafter for each in reversed(self._listed)}
        self.needs = combine(self._listed)
        self.listens = self.listens or any(each.drafter.listens for each in self._listed)

    @property
    def caches(self) -> Sequence[KVCache]:  # type: ignore[override]  # also of sub-drafters that are added later
        """The caches of all sub-drafters."""
        return tuple(cache for each in self._listed for cache in each.drafter.caches)

    def route(self, requests: Sequence[Request]) -> Routes:
        """Return the sub-drafters, each with the requests that it drafts for."""
        return [(each, requests) for each in self.guarded]

    def count(self, errors: int) -> None:
        """Count errors of a sub-drafter."""
        self.errors += errors

    def propose_with(
        self, guarded: GuardedDrafter, pairs: Iterable[tuple[Request, int]], selector: Selector | None = None
    ) -> Proposals:
        """Return a sub-drafter's non-empty drafts for pairs (request, limit), within its own limits too."""
        needs, wanted = guarded.drafter.needs, list[tuple[Request, int]]()
        bounded = needs.max_nodes is not None or needs.max_positions is not None
        for request, limit in pairs:
            own = bound(needs, request, limit) if bounded or request.search is not None else limit
            if own > 0:
                if request.seq_id not in guarded.begun:  # one that failed has ended
                    guarded.begin(request, self._sources.get(request.seq_id))
                wanted.append((request, own))
        if not wanted:
            return {}
        return guarded.propose(wanted, self._vocab_size, selector)

    @override
    def begin(self, request: Request) -> None:
        for each, _ in self.route([request]):
            each.begin(request)

    @override
    def observe_source(self, request: Request, source: Source) -> None:
        self._sources[request.seq_id] = source
        for each, _ in self.route([request]):
            each.observe_source(request, source)

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        for each, own in self.route(requests):
            each.catch_up(own)

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        """Give each sub-drafter the hidden states of its own layers."""
        for each, _ in self.route([request]):
            if each.drafter.listens:
                each.observe(request, rows, self.needs.hidden_layers)

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        for each, _ in self.route([request]):
            each.roll_back(request, dropped)

    @override
    def match_prefix(self, request: Request) -> int:
        """Return the least of the sub-drafters' answers."""
        return min([each.match_prefix(request) for each, _ in self.route([request])], default=len(request.tokens))

    @override
    def end(self, request: Request) -> None:
        self._sources.pop(request.seq_id, None)
        for each in self.guarded:
            each.end(request)


class Drafters(CompositeDrafter):
    """The drafter of an engine: each sequence has the sub-drafter that its `DraftRules.method` names, or none.

    drafters: of the start, by method. default: the method of requests that name none; None = none.
    make: makes a drafter when a request first names it; it raises ConfigError for a method that a request can't use.
    default_length: how many tokens a method drafts unless its drafter announces a number. absence: why there is no
    default method. num_layers: the target's; a drafter that needs another layer is refused. prices: those of
    `DrafterContext`, by method. weight_bytes: of the draft models.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter] | None = None,
        default: str | None = None,
        make: Callable[[str], Drafter] | None = None,
        default_length: Callable[[str], int] = lambda method: 1,
        absence: str = "it was made without a drafter",
        num_layers: int | None = None,
        prices: Mapping[str, DraftPrice] = MappingProxyType({}),
        weight_bytes: int = 0,
    ) -> None:
        self._prices, self.weight_bytes = prices, weight_bytes
        self.default, self._make, self._default_length, self.absence = default, make, default_length, absence
        self._num_layers, self._by_method = num_layers, dict[str, GuardedDrafter]()
        self.needs_by_method: dict[str | None, DrafterNeeds] = {}  # of the drafters that were made
        self.metrics = EngineMetrics()
        super().__init__([self._completed(method, each) for method, each in (drafters or {}).items()], 0)

    def attach(self, vocab_size: int, metrics: EngineMetrics) -> None:
        """Draft for an engine: check drafts against its target's vocabulary, and count errors in its metrics."""
        self._vocab_size, self.metrics = vocab_size, metrics

    @classmethod
    def of(cls, drafter: Drafter | None) -> Drafters:
        """Return the drafters of an engine that has one, for every request; None = none."""
        return cls() if drafter is None else cls({"default": drafter}, "default")

    def _completed(self, method: str, drafter: Drafter) -> SubDrafter:
        return SubDrafter.of(method, drafter, self._default_length(method), self._num_layers)

    @override
    def add(self, *added: SubDrafter) -> None:
        super().add(*added)
        self._by_method = {each.name: each for each in self.guarded}
        self.needs_by_method = {each.name: each.drafter.needs for each in self.guarded}

    @override
    def route(self, requests: Sequence[Request]) -> Routes:
        by_method: dict[str | None, list[Request]] = {}
        for request in requests:
            by_method.setdefault(request.drafts.method, []).append(request)
        return [(each, by_method[method]) for method, each in self._by_method.items() if method in by_method]

    @override
    def count(self, errors: int) -> None:
        self.metrics.drafter_errors += errors

    def usual_length(self, method: str) -> int:
        """Return how many tokens a method drafts by default."""
        needs = self.needs_by_method.get(method)
        return (needs and needs.usual_nodes) or self._default_length(method)

    def needs_of(self, method: str) -> DrafterNeeds:
        """Return the needs of a method's drafter, and the usual ones if it was not made."""
        return self.needs_by_method.get(method) or DrafterNeeds()

    def price(self, method: str) -> DraftPrice | None:
        """Return the `DraftPrice` that the policy sets for a method's chains; None = the method was not made."""
        return self._prices.get(method)

    def find(self, method: str) -> Drafter:
        """Return a method's drafter: one that was loaded within another, or a new one.

        Raises ConfigError if it can't be made.
        """
        if method not in self._by_method:
            drafter = next((own[method] for each in self.guarded if method in (own := within(each.drafter))), None)
            if drafter is None:
                assert self._make is not None, f"nothing makes the drafter {method!r}"
                drafter = self._make(method)
            self.add(self._completed(method, drafter))
        return self._by_method[method].drafter

    def target_top_k(self, request: Request) -> int:
        """Return how many of the target's most likely tokens the drafter of a sequence needs, for each row."""
        needs = self.needs_by_method.get(request.drafts.method)
        return 0 if needs is None else needs.reads.top_k

    def begin_all(self, sequences: Iterable[tuple[Request, Source | None]]) -> None:
        """Begin the sequences that have not begun, each with its source, which is encoded."""
        for request, source in sequences:
            method = request.drafts.method
            if method is not None and request.seq_id not in (own := self._by_method[method]).begun:
                own.begin(request, source)

    @override
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], selector: Selector | None = None
    ) -> list[DraftTree]:
        """Return a checked draft for each sequence; an empty one where there is no drafter or it fails.

        selector: see `GuardedDrafter.propose`.
        """
        by_method: dict[str | None, list[tuple[Request, int]]] = {}
        for pair in zip(requests, limits, strict=True):
            by_method.setdefault(pair[0].drafts.method, []).append(pair)
        proposed, drafts, empty = Proposals(), list[DraftTree](), DraftTree.empty()
        for method, each in self._by_method.items():
            if method in by_method:
                proposed |= each.propose(by_method[method], self._vocab_size, selector)
        for request in requests:
            drafts.append(proposed.get(request.seq_id, empty))
        return drafts

    def observes(self, request: Request) -> bool:
        """Whether the drafter of a sequence observes."""
        if not self.listens or request.drafts.method is None:
            return False
        own = self._by_method[request.drafts.method]
        return own.drafter.listens and request.seq_id in own.begun

    def lasting(self) -> dict[str, Drafter]:
        """Return the drafters, at any depth, that learn something for later engines, by method."""
        return {method: each for method, each in within(self).items() if each.keeps}

    def check(self) -> None:
        """Assert the integrity of the drafters' caches."""
        for cache in self.caches:
            cache.check()


def within(drafter: Drafter) -> Mapping[str, Drafter]:
    """Return the drafters within a drafter, at any depth, by method; its own ones count first."""
    deeper = [within(each) for each in drafter.sub_drafters.values()]
    return {name: each for own in deeper for name, each in own.items()} | dict(drafter.sub_drafters)


def combine(sub_drafters: Sequence[SubDrafter]) -> DrafterNeeds:
    """Return the needs of a drafter that proposes one of its sub-drafters' drafts at a time; of none, no needs."""
    needs = [each.drafter.needs for each in sub_drafters] or [DrafterNeeds()]
    return DrafterNeeds(
        max_nodes=_largest([each.max_nodes for each in needs]),
        emits_probs=any(each.emits_probs for each in needs),
        emits_tree=any(each.emits_tree for each in needs),
        usual_nodes=max([each.usual_nodes for each in sub_drafters], default=None),
        max_positions=_largest([each.max_positions for each in needs]),
        nodes_per_beam=max(each.nodes_per_beam or 0 for each in needs) or None,
        own_cache=any(each.own_cache for each in needs),
        stops=any(each.stops for each in needs),
        hidden_layers=tuple(sorted({layer for each in needs for layer in each.hidden_layers})),
        reads=DrafterReads(
            top_k=max(each.reads.top_k for each in needs),
            target_cache=any(each.reads.target_cache for each in needs),
            encoder=any(each.reads.encoder for each in needs),
            prediction=any(each.reads.prediction for each in needs),
        ),
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
    made = build_method(facts, build, replace(context, options=options, model=model))
    sub_drafter = SubDrafter.of(method, made, facts.default_length)
    if sub_drafter.drafter.needs.target_inputs:
        raise ConfigError(
            f"method {method!r} drafts in the target's own pass and can't be used within another method",
            "use it alone.",
        )
    return sub_drafter
