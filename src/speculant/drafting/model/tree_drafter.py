"""A drafter around one model that draws chains, or trees of a topology."""

from __future__ import annotations

from dataclasses import replace

from speculant.drafting.model.drafter import NODES_PER_BEAM, ChainDrafter, Drafting
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.model.trees import grow_trees, plan_trees
from speculant.drafting.topology import TreeTopology
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.types import DraftTree


class TreeDrafter(ChainDrafter):
    """Drafts chains, or trees of a topology; see `ChainDrafter`. topology None = chains."""

    def __init__(
        self,
        runner: DraftModelRunner,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | None = None,
    ) -> None:
        super().__init__(runner, vocab_size, sampler)
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
