"""A small model that drafts a chain token by token (arXiv 2211.17192), or a tree level by level (arXiv 2305.09781).

For a beam search it drafts continuations of the target's beams, with a wider beam (arXiv 2211.17192, A.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, DrafterNeeds, Method, StatelessDrafter, read_options
from speculant.drafting.growth.beams import draft_beams
from speculant.drafting.growth.chains import grow
from speculant.drafting.growth.runner import DraftModelRunner
from speculant.drafting.growth.topology import StaticTree, TreeTopology
from speculant.drafting.growth.trees import grow_trees, plan_trees
from speculant.errors import ConfigError
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances
from speculant.types import DraftTree, Request

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # docs/references.md, configuration
NODES_PER_BEAM = 2


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain."""

    tree: Any = None


class ModelDrafter(StatelessDrafter):
    """Drafts with `model`, all sequences of a round in one flat batch.

    vocab_size is the target's: the draft's distributions are cut or padded with zeros to it. topology None = chains.
    max_num_batched_tokens bounds the backlog that is processed in a round.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        vocab_size: int,
        max_num_batched_tokens: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | None = None,
    ) -> None:
        nodes = topology.most_nodes if topology else None
        self.needs = DrafterNeeds(
            max_nodes=nodes,
            emits_probs=True,
            emits_tree=topology is not None,
            usual_nodes=nodes,
            tree_depth=topology.depth if topology else None,
            own_cache=True,
            max_positions=model.max_positions,
            nodes_per_beam=NODES_PER_BEAM,
        )
        self._runner = DraftModelRunner(model, cache, chances, max_num_batched_tokens)
        self.caches = (cache,)
        self._topology, self._vocab_size, self._sampler = topology, vocab_size, sampler

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._runner.begin(request)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._runner.end(request)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        self._grow_chains([(request, 0) for request in requests])

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        drafting = [(request, limit) for request, limit in zip(requests, limits, strict=True) if limit > 0]
        others = [(request, limit) for request, limit in drafting if request.search is None]
        made = self._grow_chains(others) if self._topology is None else self._grow_trees(others, self._topology)
        if len(others) < len(drafting):
            made |= self._search([(request, limit) for request, limit in drafting if request.search is not None])
        return [made.get(request.seq_id, DraftTree.empty()) for request in requests]

    def _grow_chains(self, drafting: Sequence[tuple[Request, int]]) -> dict[int, DraftTree]:
        runner = self._runner
        chains = runner.plan(drafting)
        grow(runner.model, chains, runner.cache, self._vocab_size, self._sampler)
        for chain in chains:
            runner.note(chain.request, [*chain.input_tokens, *chain.tokens[:-1]])
        return {chain.request.seq_id: DraftTree.chain(chain.tokens, chain.probs) for chain in chains if chain.tokens}

    def _grow_trees(self, drafting: Sequence[tuple[Request, int]], topology: TreeTopology) -> dict[int, DraftTree]:
        trees = plan_trees([self._runner], drafting)
        grow_trees([self._runner], trees, topology, self._vocab_size, self._sampler)
        return {tree.request.seq_id: tree.draft() for tree in trees if tree.tokens}

    def _search(self, drafting: Sequence[tuple[Request, int]]) -> dict[int, DraftTree]:
        """Draft beams, at most as deep as the configured tree."""
        if self._topology is not None:
            level = NODES_PER_BEAM * self._topology.depth
            drafting = [
                (request, min(limit, level * request.search.beams.width))
                for request, limit in drafting
                if request.search is not None
            ]
        return draft_beams(self._runner, drafting, NODES_PER_BEAM, self._vocab_size, self._sampler)


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    topology = read_tree(read_options(context, Options).tree)
    model = context.load_draft(str(context.model))
    cache = context.make_cache(model.cache_shape)
    return ModelDrafter(
        model, cache, context.chances, context.vocab_size, context.max_num_batched_tokens, context.sampler, topology
    )


def read_tree(given: Any) -> StaticTree | None:
    """Read the option `tree`; None stays None."""
    if given is None:
        return None
    error = ConfigError(
        f"tree={given!r} is not the shape of a tree",
        "give children per node at each depth, as [3, 2, 1], or every node's ranks, parents among them: [[0], [0, 0]].",
    )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise error
    if all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in given):
        return StaticTree.of_widths(given)
    if not all(isinstance(path, list | tuple) and path and all(_is_rank(rank) for rank in path) for path in given):
        raise error
    shape = StaticTree(frozenset(tuple(path) for path in given))
    if not shape.is_whole():
        raise error
    return shape


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
