"""A small model that drafts a chain token by token (arXiv 2211.17192), or a tree level by level (arXiv 2305.09781).

For a beam search it drafts continuations of the target's beams, with a wider beam (arXiv 2211.17192, A.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from speculant.cache.base import KVCache
from speculant.drafting.base import DrafterContext, Method, read_options, require_no_stop
from speculant.drafting.growth.drafter import NODES_PER_BEAM, ChainDrafter, Drafting
from speculant.drafting.growth.topology import StaticTree, TreeTopology
from speculant.drafting.growth.trees import grow_trees, plan_trees
from speculant.drafting.head_tokens import read_head_tokens
from speculant.errors import ConfigError
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.sampling.chance import Chances
from speculant.types import DraftTree

METHOD = Method(default_length=5, uses_model=True, preferred=True)  # docs/references.md, configuration


@dataclass(frozen=True)
class Options:
    """tree: children per node at each depth, as [3, 2, 1], or the ranks on the way to every node; None = a chain.

    head_tokens: the file of a short head, see drafting/head_tokens.py; None = all tokens can be drawn.
    """

    tree: Any = None
    head_tokens: Any = None


class ModelDrafter(ChainDrafter):
    """Drafts chains, or trees of a topology; see `ChainDrafter`. topology None = chains."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chances: Chances,
        vocab_size: int,
        max_num_batched_tokens: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | None = None,
        stop_below: float = 0.0,
    ) -> None:
        super().__init__(model, cache, chances, vocab_size, max_num_batched_tokens, sampler, stop_below)
        nodes = topology.most_nodes if topology else None
        depth = topology.depth if topology else None
        self.needs = replace(
            self.needs, max_nodes=nodes, emits_tree=topology is not None, usual_nodes=nodes, tree_depth=depth
        )
        self._topology = topology

    def _draft(self, drafting: Drafting) -> dict[int, DraftTree]:
        return super()._draft(drafting) if self._topology is None else self._grow_trees(drafting, self._topology)

    def _grow_trees(self, drafting: Drafting, topology: TreeTopology) -> dict[int, DraftTree]:
        trees = plan_trees([self._runner], drafting)
        grow_trees([self._runner], trees, topology, self._vocab_size, self._sampler)
        return {tree.request.seq_id: tree.draft() for tree in trees if tree.tokens}

    def _search(self, drafting: Drafting) -> dict[int, DraftTree]:
        """Draft beams, at most as deep as the configured tree."""
        if self._topology is not None:
            level = NODES_PER_BEAM * self._topology.depth
            drafting = [
                (request, min(limit, level * request.search.beams.width))
                for request, limit in drafting
                if request.search is not None
            ]
        return super()._search(drafting)


def build(context: DrafterContext) -> ModelDrafter:
    """Load the draft checkpoint and give it a cache of its own."""
    options = read_options(context, Options)
    topology = read_tree(options.tree)
    if topology is not None:
        require_no_stop(context)
    model = context.load_draft(str(context.model), read_head_tokens(options.head_tokens))
    cache = context.make_cache(model.cache_shape)
    return ModelDrafter(
        model,
        cache,
        context.chances,
        context.vocab_size,
        context.max_num_batched_tokens,
        context.sampler,
        topology,
        context.stop_below,
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
