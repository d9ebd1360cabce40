"""What a drafter is, and what it is given to build itself from.

A drafter is one module with a function `build(context) -> Drafter`, a constant `METHOD` and, if it
takes options of its own, a frozen dataclass `Options`. State is keyed by `request.seq_id` and may be behind
`request.tokens`: a drafter catches up in the next `propose`, so there is no special case for a first round, a
round without drafting, or one in which everything was accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from speculant.cache.base import CacheShape, KVCache
from speculant.errors import ConfigError, suggest
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances
from speculant.types import CommittedRows, DraftTree, Request

T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """What a drafter's module says about itself before anything is built.

    default_length: draft tokens per step unless the user says otherwise.
    uses_model: a draft model must be named, and without it none may be.
    preferred: the one that is meant when a draft model is named without a method.
    learns: earlier requests make its later drafts better.
    """

    default_length: int
    uses_model: bool = False
    preferred: bool = False
    learns: bool = False


@dataclass(frozen=True)
class DrafterNeeds:
    """What a drafter announces to the engine as data.

    max_nodes: the most nodes it can propose for one sequence; None = any number.
    emits_probs: its trees carry the distributions they were drawn from when a ratio rule will want them.
    emits_tree: its trees may branch.
    usual_nodes: nodes it proposes unless the user says otherwise; None = its method's default_length.
    own_cache: it keeps KV caches of its own; they are its `caches`.
    hidden_layers: target layers whose input hidden states it wants in `observe`; the number of layers asks for what
    leaves the last one.
    target_inputs: it adds rows of its own to the target's pass; not supported yet.
    max_positions: the longest sequence it can draft for; None = any.
    nodes_per_beam: how many nodes it drafts for each beam of a beam search in each round. For those it is asked to
    extend `search.beams.live_tree`, which its tree then begins with. None = it is never asked, and beam search is
    plain.
    """

    max_nodes: int | None = None
    emits_probs: bool = False
    emits_tree: bool = False
    usual_nodes: int | None = None
    own_cache: bool = False
    hidden_layers: tuple[int, ...] = ()
    target_inputs: bool = False
    max_positions: int | None = None
    nodes_per_beam: int | None = None


class Drafter(Protocol):
    """Proposes what might come next. It never changes a request.

    `begin` comes first and `end` last for each sequence. An error in any of these calls costs drafts and never fails a
    request: the sequence then begins anew.
    """

    needs: DrafterNeeds

    @property
    def caches(self) -> Sequence[KVCache]:
        """The KV caches that it keeps."""
        ...

    def begin(self, request: Request) -> None:
        """Take note of a new sequence."""
        ...

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """Return one tree per sequence with at most `limits[i]` nodes, behind those of a beam search's `live_tree`.

        An empty one is legal.
        """
        ...

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Process the tokens that were not seen yet, as far as budget and memory go, without drawing any."""
        ...

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """Take note of what a target pass computed and is committed; `request.tokens` already ends with what it gained.

        It is called after every pass that the sequence took part in, those over parts of its prompt too.
        """
        ...

    def match_prefix(self, request: Request) -> int:
        """Return how many positions of `request.tokens` the target may take over from the prefix index.

        A drafter that can do without having observed them returns the number of tokens.
        """
        ...

    def end(self, request: Request) -> None:
        """Forget a sequence that is over or was preempted; it may begin again."""
        ...


class StatelessDrafter:
    """A `Drafter` without state: what remains to be written is `propose`. Override what a drafter does need."""

    needs = DrafterNeeds()
    caches: Sequence[KVCache] = ()

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""

    def observe(self, request: Request, rows: CommittedRows) -> None:
        """See `Drafter.observe`."""

    def match_prefix(self, request: Request) -> int:
        """See `Drafter.match_prefix`."""
        return len(request.tokens)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""


_CALLS = ("caches", "begin", "propose", "catch_up", "observe", "match_prefix", "end")


def complete(drafter: Any, num_layers: int | None = None) -> Drafter:
    """Return a drafter whose missing calls are those of `StatelessDrafter`; `propose` and `needs` must be there.

    Raises ConfigError for a drafter that announces what can't be had from a target of so many layers (None = unknown).
    """
    name = type(drafter).__name__
    needs = getattr(drafter, "needs", None)
    if not isinstance(needs, DrafterNeeds) or not callable(getattr(drafter, "propose", None)):
        raise ConfigError(f"drafter {name} lacks `propose` or `needs`", "define both; see docs/adding-a-drafter.md.")
    if needs.target_inputs:
        raise ConfigError(f"drafter {name} adds rows to the target's pass: not supported yet", "choose another.")
    if num_layers is not None and any(not 0 <= layer <= num_layers for layer in needs.hidden_layers):
        raise ConfigError(
            f"drafter {name} asks for hidden_layers {list(needs.hidden_layers)} of a target with {num_layers} layers",
            f"use layers from 0 to {num_layers}.",
        )
    if getattr(drafter, "caches", ()) and not needs.own_cache:
        raise ConfigError(f"drafter {name} has caches and does not announce them", "set own_cache in its needs.")
    if all(hasattr(drafter, call) for call in _CALLS):
        return cast(Drafter, drafter)
    completed = StatelessDrafter()
    for call in ("needs", *_CALLS):
        if hasattr(drafter, call):
            setattr(completed, call, getattr(drafter, call))
    return cast(Drafter, completed)


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may build itself from.

    load_draft: loads a checkpoint by name and checks that its tokens are the target's.
    make_cache: makes a cache of the engine's kind for a model's cache shape.
    sampler: what makes the target's distributions.
    """

    options: Mapping[str, Any]
    model: str | None
    vocab_size: int
    device: torch.device
    chances: Chances
    max_num_batched_tokens: int
    load_draft: Callable[[str], CausalLM]
    make_cache: Callable[[CacheShape], KVCache]
    sampler: Sampler = REFERENCE


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
