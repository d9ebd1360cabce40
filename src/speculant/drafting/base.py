"""The drafter protocol, and the context that a drafter is built from.

A drafter is one module with a function `build(context) -> Drafter`, a constant `METHOD` and, for options of
its own, a frozen dataclass (`read_options`). State is keyed by `request.seq_id` and may lag
`request.tokens`: a drafter catches up in the next `propose`, so there is no special case for a first round, a
round without drafting, or one in which everything was accepted.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
from typing_extensions import override

from speculant.cache import CacheShape, KVCache, Source
from speculant.errors import ConfigError, suggest
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, MappedVocabulary
from speculant.sampling import Chances
from speculant.text import Tokenizer
from speculant.types import CommittedRows, DraftPrice, DraftTree, Request


class Selector(Protocol):
    """What a draft-length policy decides about the drafts of one sequence."""

    def prefers(self, request: Request, scores: Sequence[float], parents: Sequence[int]) -> bool:
        """Whether a deterministic draft with scores is worth more than one that a model would draw.

        scores, parents: of the draft's nodes, parents first, likeliest first.
        """
        ...

    def longest_unscored(self, request: Request) -> int | None:
        """Return the most nodes of a draft that a model draws in this step; None = no bound but the limit."""
        ...


T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """Facts about a drafting method that are needed before anything is built.

    default_length: draft tokens per step unless the user sets a number.
    uses_model: the method needs a draft model. accepts_model: a draft model may be named and need not be. A method with
    neither refuses one.
    learns: earlier requests make its later drafts better.
    on_request: a request may name it although the configuration does not. Such a method keeps no state across requests,
    or bounded state for each cache salt.
    varies: the length of its drafts depends on what it finds, not only on the limit.
    reads_masks: its model must have been trained to predict several tokens in one pass, and has a mask token.
    uses_head: its model is a head, whose matrices are multiplied on the kernels of the target.
    in_target: its head may be among the target's weights, and is looked for there if no model is named.

    The roles of methods (which one is the default, which look drafts up in text) are in drafting/methods.py.
    """

    default_length: int
    uses_model: bool = False
    accepts_model: bool = False
    learns: bool = False
    on_request: bool = True
    varies: bool = False
    reads_masks: bool = False
    uses_head: bool = False
    in_target: bool = False


@dataclass(frozen=True)
class DrafterReads:
    """What a drafter reads beside tokens and hidden states, as data.

    top_k: how many of the target's most likely next tokens `observe` receives for each row that has logits
    (`CommittedRows.successors`); 0 = none are computed.
    target_cache: a sequence's keys and values in the target's cache, without its newest token, and its source's, which
    `observe_source` names.
    encoder: the encoder's results; `observe_source` receives them.
    prediction: `DraftRules.prediction`; a request with a prediction and a drafter that does not read it is refused.
    """

    top_k: int = 0
    target_cache: bool = False
    encoder: bool = False
    prediction: bool = False


@dataclass(frozen=True)
class DrafterNeeds:
    """A drafter's capabilities and requirements, as data.

    max_nodes: the most nodes it can propose for one sequence; None = any number.
    emits_probs: its trees carry the distributions they were drawn from where a ratio rule needs them; a tree without
    is deterministic under any rule.
    emits_tree: its trees may branch.
    usual_nodes: nodes it proposes unless the user sets a number; None = its method's default_length.
    tree_depth: the depth of a tree of its usual nodes; None = it drafts chains, or trees whose nodes have scores.
    max_positions: the longest sequence it can draft for; None = any.
    nodes_per_beam: nodes that it drafts per beam and round of a beam search. Such a draft begins with the nodes of
    `search.beams.live_tree` and extends them. None = beam searches get no drafts.
    own_cache: it owns KV caches; they are its `caches`.
    hidden_layers: target layers whose input hidden states `observe` receives; with L layers, L stands for the last
    layer's output, and L + 1 for that output after the final norm.
    target_inputs: the most look-ahead rows that it adds to the target's pass below the root and each node
    (`LookAheadTree`); it adds at most as many as its limit on nodes. A drafter with such rows can't be a sub-drafter.
    reads: what it reads beside tokens and hidden states.
    selects: the draft-length policy selects between its sub-drafters' drafts, see `propose_selected`.
    stops: its chains end as `DrafterContext.price` says.
    """

    max_nodes: int | None = None
    emits_probs: bool = False
    emits_tree: bool = False
    usual_nodes: int | None = None
    tree_depth: int | None = None
    max_positions: int | None = None
    nodes_per_beam: int | None = None
    own_cache: bool = False
    hidden_layers: tuple[int, ...] = ()
    target_inputs: int = 0
    reads: DrafterReads = DrafterReads()
    selects: bool = False
    stops: bool = False


class Drafter(Protocol):
    """Proposes likely next tokens. It never changes a request.

    `begin` comes first and `end` last for each sequence. An error in any of these calls loses drafts and never fails a
    request: the sequence then begins again.
    """

    needs: DrafterNeeds
    keeps: str
    """The form of what it learns from texts and a later engine may use, such as "texts"; "" = there is nothing."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """The KV caches that it owns."""
        ...

    @property
    def errors(self) -> int:
        """How many errors of its sub-drafters have cost drafts so far."""
        ...

    @property
    def sub_drafters(self) -> Mapping[str, Drafter]:
        """The drafters within it, by method."""
        ...

    @property
    def listens(self) -> bool:
        """Whether it observes; one that combines others says whether they do."""
        ...

    def begin(self, request: Request) -> None:
        """Start a new sequence."""
        ...

    def observe_source(self, request: Request, source: Source) -> None:
        """Record a sequence's source after `begin`.

        Only drafters whose `DrafterReads` have `encoder` or `target_cache` are called. Until the sequence ends, the
        target's cache holds the source as the sequence `source.seq_id`. The encoder's result is `source.states`
        [tokens, hidden]; None if no drafter needs it.
        """
        ...

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Return one tree per sequence with at most `limits[i]` nodes, not counting a beam search's `live_tree`.

        An empty tree is legal.
        """
        ...

    def propose_selected(
        self, requests: Sequence[Request], limits: Sequence[int], selector: Selector | None
    ) -> list[DraftTree]:
        """Propose as `propose` does, in its place, for drafters that announce `selects`.

        selector: the engine's draft-length policy; None = nothing selects.
        """
        ...

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Process the tokens not yet seen, as far as budget and memory allow, without drawing any."""
        ...

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """Record the committed rows of a target pass; `request.tokens` already ends with the gained tokens.

        It is called after every pass of the sequence, including those over chunks of its prompt. A drafter that needs
        tokens alone has none and reads `request.tokens` when it drafts: a step without drafts then costs it nothing.
        """
        ...

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Forget the tokens `dropped`, which were at the end of `request.tokens` and have been removed from it.

        Only another drafter calls it, whose requests have drafted tokens after the committed ones.
        """
        ...

    def match_prefix(self, request: Request) -> int:
        """Return how many positions of `request.tokens` the target may take over from the prefix index.

        A drafter that does not need to observe these positions returns the number of tokens.
        """
        ...

    def end(self, request: Request) -> None:
        """Forget a sequence that ended or was preempted; it may begin again."""
        ...

    def learned(self) -> Iterator[tuple[str, Sequence[array[int]]]]:
        """Yield each cache salt for which it has learnt since the last call, and all that it knows for it, in parts.

        The first call, before anything is learnt, begins it: a drafter that nobody asks need not remember for it. A
        part has numbers below the size of the vocabulary, -1 or more, in an array of type "i", and is not changed
        later. Other calls may come between two salts.
        """
        ...

    def learn(self, salt: str, part: array[int]) -> None:
        """Learn a part for a salt that a drafter of the same `keeps` yielded. Raises DraftError for another form."""
        ...


class StatelessDrafter(Drafter):
    """A `Drafter` without state. Subclasses define `propose` and override the other calls that they need.

    A class that defines `observe` listens, unless it sets `listens` itself.
    """

    needs = DrafterNeeds()
    keeps: str = ""
    caches: Sequence[KVCache] = ()
    errors: int = 0
    sub_drafters: Mapping[str, Drafter] = MappingProxyType({})
    listens: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "observe" in vars(cls) and "listens" not in vars(cls):
            cls.listens = True

    @override
    def begin(self, request: Request) -> None:
        pass

    @override
    def observe_source(self, request: Request, source: Source) -> None:
        pass

    @override
    def propose_selected(
        self, requests: Sequence[Request], limits: Sequence[int], selector: Selector | None
    ) -> list[DraftTree]:
        return self.propose(requests, limits)

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        pass

    @override
    def observe(self, request: Request, rows: CommittedRows) -> None:
        pass

    @override
    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """Begin the sequence again; the next `propose` catches up with all of it."""
        self.end(request)
        self.begin(request)

    @override
    def match_prefix(self, request: Request) -> int:
        return len(request.tokens)

    @override
    def end(self, request: Request) -> None:
        pass

    @override
    def learned(self) -> Iterator[tuple[str, Sequence[array[int]]]]:
        return iter(())

    @override
    def learn(self, salt: str, part: array[int]) -> None:
        pass


def is_built_in(drafter: Drafter) -> bool:
    """Whether a drafter is one of this package, whose probs the contract tests prove."""
    modules = type(drafter).__module__, getattr(drafter.propose, "__module__", "")
    return all(module.startswith("speculant.drafting.") for module in modules)


_CALLS = (
    "caches", "errors", "sub_drafters", "listens", "begin", "observe_source", "propose", "propose_selected",
    "catch_up", "observe", "roll_back", "match_prefix", "end", "keeps", "learned", "learn",
)  # fmt: skip


def complete(drafter: Any, num_layers: int | None = None) -> Drafter:
    """Return a drafter with missing calls taken from `StatelessDrafter`; `propose` and `needs` must exist.

    This is the only place that looks for calls: others' drafters need not derive from `StatelessDrafter`. Raises
    ConfigError for needs that a target of `num_layers` layers (None = unknown) can't meet.
    """
    name = type(drafter).__name__
    needs = getattr(drafter, "needs", None)
    if not isinstance(needs, DrafterNeeds) or not callable(getattr(drafter, "propose", None)):
        raise ConfigError(f"drafter {name} lacks `propose` or `needs`", "define both; see docs/adding-a-drafter.md.")
    layers = needs.hidden_layers
    if num_layers is not None and any(not 0 <= layer <= num_layers + 1 for layer in layers):
        raise ConfigError(
            f"drafter {name} needs hidden_layers {list(layers)} of a target with {num_layers} layers",
            f"use layers from 0 to {num_layers}, or {num_layers + 1} for the states that the output head reads.",
        )
    if getattr(drafter, "caches", ()) and not needs.own_cache:
        raise ConfigError(f"drafter {name} has caches and does not announce them", "set own_cache in its needs.")
    if all(hasattr(drafter, call) for call in _CALLS):
        return cast(Drafter, drafter)
    completed = cast(Any, StatelessDrafter)()
    completed.listens = hasattr(drafter, "observe")
    for call in ("needs", *_CALLS):
        if hasattr(drafter, call):
            setattr(completed, call, getattr(drafter, call))
    return cast(Drafter, completed)


class LoadDraft(Protocol):
    """Loads a draft model. head_tokens: the tokens that it can draw, in ascending order; () = all."""

    def __call__(self, source: str, head_tokens: tuple[int, ...] = ()) -> CausalLM:
        """Return the model. Raises SpeculantError for one that can't be used."""
        ...


Build = Callable[["DrafterContext"], Any]  # the function `build` of a drafter's module


@dataclass(frozen=True)
class DraftModels:
    """Loads what drafters compute with.

    load: loads a checkpoint by name and fits its vocabulary to the target's; see `LoadDraft`.
    vocabulary_of: returns how a loaded draft model reads the target's texts; None = token by token, as they are.
    keep_prompts: lets a loaded draft model's cache keep its prompts on disk, if the engine does.
    round_head: returns the context whose target computes a head in the type that was configured, or is fastest.
    """

    load: LoadDraft
    vocabulary_of: Callable[[CausalLM], MappedVocabulary | None] = lambda model: None
    keep_prompts: Callable[[CausalLM, KVCache], None] = lambda model, cache: None
    round_head: Callable[[Build, DrafterContext], DrafterContext] = lambda build, context: context


@dataclass(frozen=True)
class Target:
    """What drafters know of the target.

    sampler: computes its distributions. model: None = there is none. tokenizer: None = texts can't be read.
    cache: returns its cache, which is made after the drafters; None = there is none.
    """

    vocab_size: int
    device: torch.device
    sampler: Sampler = REFERENCE
    model: CausalLM | None = None
    tokenizer: Tokenizer | None = None
    cache: Callable[[], KVCache | None] = lambda: None


@dataclass(frozen=True)
class DrafterContext:
    """Everything that a drafter is built from.

    options: the method's. model: the draft model that the user names; None = none.
    make_cache: makes a cache of the engine's kind for a model's cache shape.
    stop_below: a draft that a model draws ends after a token of a lower probability; 0 = it does not. price: what
    a further token of the method's drafts costs.
    """

    options: Mapping[str, Any]
    model: str | None
    target: Target
    models: DraftModels
    make_cache: Callable[[CacheShape], KVCache]
    chances: Chances
    max_num_batched_tokens: int
    stop_below: float = 0.0
    price: DraftPrice = field(default_factory=DraftPrice)


def build_method(facts: Method, build: Build, context: DrafterContext) -> Any:
    """Build a drafter; its head, if it has one, gets its type first."""
    return build(context.models.round_head(build, context) if facts.uses_head else context)


def require_no_stop(context: DrafterContext) -> None:
    """Refuse `stop_below` for drafters of trees without scores."""
    if context.stop_below:
        raise ConfigError(
            "draft_length 'confidence' stops chains, and this method draws trees", 'draft chains, or use "adaptive".'
        )


def read_options(context: DrafterContext, kind: type[T]) -> T:
    """Build a drafter's own options from the speculative config.

    An unknown key is an error, and so is a value of another type than the option's default.
    """
    known = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in context.options.items():
        if key not in known:
            raise ConfigError(f"unknown speculative_config key {key!r} for this method", suggest(key, known))
        if not _is_like(value, known[key]):
            raise ConfigError(
                f"speculative_config key {key!r} has the value {value!r}", f"use a value like {known[key]!r}."
            )
    return kind(**context.options)


def _is_like(value: object, default: object) -> bool:
    if default is None or default is dataclasses.MISSING:
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(value, type(default)) or (isinstance(default, float) and isinstance(value, int))


def no_options(context: DrafterContext) -> None:
    """Refuse any option, for drafters that have none."""
    for key in context.options:
        raise ConfigError(f"unknown speculative_config key {key!r} for this method", "remove it.")
