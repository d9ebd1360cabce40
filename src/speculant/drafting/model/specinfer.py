"""Parallel chains, merged into one prefix tree that is verified in one pass (arXiv 2305.09781).

One or several draft models draw the chains. For greedy and seeded requests, where a model's draw is deterministic, its
chains are its likeliest continuations under the request's noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from speculant.drafting.base import (
    DrafterContext,
    DrafterNeeds,
    Method,
    StatelessDrafter,
    read_options,
    require_no_stop,
)
from speculant.drafting.composite import Proposals
from speculant.drafting.growth import Drafting, grow_trees
from speculant.drafting.model.drafter import DraftModelRunner
from speculant.drafting.topology import ParallelChains
from speculant.errors import ConfigError
from speculant.kernels import REFERENCE, Sampler
from speculant.types import DraftTree, Request

USUAL_DRAWS, USUAL_DEPTH = 3, 4
METHOD = Method(default_length=USUAL_DRAWS * USUAL_DEPTH, uses_model=True)


@dataclass(frozen=True)
class SpecInferOptions:
    """models: draft models in addition to `model`. draws: chains per model. depth: tokens in a chain.

    draws None = 3 with a single model, 1 each with several.
    """

    models: Any = None
    draws: Any = None
    depth: int = USUAL_DEPTH


class SpecInfer(StatelessDrafter):
    """Drafts the chains of `topology` with the models of `sources`, for a target of `vocab_size` tokens."""

    def __init__(
        self,
        sources: Sequence[DraftModelRunner],
        topology: ParallelChains,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
    ) -> None:
        self.needs = DrafterNeeds(
            max_nodes=topology.most_nodes,
            emits_probs=True,
            emits_tree=True,
            usual_nodes=topology.most_nodes,
            own_cache=True,
            max_positions=min(source.model.max_positions for source in sources),
        )
        self.caches = tuple(source.cache for source in sources)
        self._sources, self._topology = sources, topology
        self._vocab_size, self._sampler = vocab_size, sampler

    @override
    def begin(self, request: Request) -> None:
        for source in self._sources:
            source.begin(request)

    @override
    def end(self, request: Request) -> None:
        for source in self._sources:
            source.end(request)

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        self._draw([(request, 0) for request in requests])

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafts = self._draw([pair for pair in zip(requests, limits, strict=True) if pair[1] > 0])
        return [drafts.get(request.seq_id, DraftTree.empty()) for request in requests]

    def _draw(self, drafting: Drafting) -> Proposals:
        return grow_trees(self._sources, drafting, self._topology, self._vocab_size, self._sampler)


def build(context: DrafterContext) -> SpecInfer:
    """Load every draft model and give each a cache of its own."""
    options = read_options(context, SpecInferOptions)
    require_no_stop(context)
    further = read_models(options.models)
    draws = read_count("draws", (1 if further else USUAL_DRAWS) if options.draws is None else options.draws)
    depth = read_count("depth", options.depth)
    models = [context.models.load(name) for name in [str(context.model), *further]]
    if any(model.needs.most_nodes is not None for model in models):
        raise ConfigError(
            "a draft model has layers with a state, which draft no trees", 'use the method "draft_model" with it.'
        )
    sources = [DraftModelRunner.of(context, model) for model in models]
    chains = tuple(source for source in range(len(sources)) for _ in range(draws))
    return SpecInfer(sources, ParallelChains(chains, depth), context.target.vocab_size, context.target.sampler)


def read_models(given: object) -> list[str]:
    """Read the option `models`."""
    listed = [] if given is None else given
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise ConfigError(f"models={given!r} is not a list of draft models", 'use for example ["path/to/another"].')
    return list(listed)


def read_count(name: str, value: object) -> int:
    """Read an option that is a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} is not a whole number above 0", f"set {name} to 1 or more.")
    return value
