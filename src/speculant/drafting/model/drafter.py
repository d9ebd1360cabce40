"""A drafter around one model: chains, trees of a topology, and continuations of a beam search's hypotheses.

With a dynamic tree, requests that a ratio rule verifies get chains as long as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from speculant.cache.sources import Source
from speculant.drafting.base import DrafterContext, DrafterNeeds, StatelessDrafter
from speculant.drafting.guard import Proposals
from speculant.drafting.model.beams import draft_beams
from speculant.drafting.model.dynamic import grow_dynamic
from speculant.drafting.model.runner import DraftModelRunner, Guess, grow
from speculant.drafting.model.trees import grow_trees, plan_trees
from speculant.drafting.topology import USUAL_NODES, DynamicTree, TreeTopology
from speculant.errors import ConfigError, PairError
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import CausalLM
from speculant.types import DraftTree, Request

NODES_PER_BEAM = 2

Drafting = Sequence[tuple[Request, int]]  # requests with their limits


class ModelDrafter(StatelessDrafter):
    """Drafts with the model of `runner`, all sequences of a round in one flat batch.

    vocab_size is the target's: the draft's distributions are cut or padded with zeros to it. topology None = chains.
    """

    guess: Guess | None = None  # guesses the tokens that the model draws next

    def __init__(
        self,
        runner: DraftModelRunner,
        vocab_size: int,
        sampler: Sampler = REFERENCE,
        topology: TreeTopology | DynamicTree | None = None,
    ) -> None:
        nodes, dynamic = topology.most_nodes if topology else None, isinstance(topology, DynamicTree)
        self.needs = DrafterNeeds(
            max_nodes=nodes,
            emits_probs=True,
            emits_tree=topology is not None,
            usual_nodes=USUAL_NODES if dynamic else nodes,
            tree_depth=topology.depth if topology and not dynamic else None,
            own_cache=runner.owns_cache,
            target_cache=not runner.owns_cache,
            max_positions=runner.model.max_positions,
            nodes_per_beam=NODES_PER_BEAM,
        )
        self._runner, self.caches = runner, (runner.cache,) if runner.owns_cache else ()
        self._vocab_size, self._sampler, self._topology = vocab_size, sampler, topology

    def read_encoder(self, target: CausalLM | None) -> None:
        """Read the results of the target's encoder instead of running its own. Raises ConfigError or PairError."""
        model = self._runner.model
        if target is None or not (target.needs.source and model.needs.source):
            raise ConfigError(
                'encoder="target" is set, and target and draft model are not both encoder-decoder models', "remove it."
            )
        if model.hidden_size != target.hidden_size:
            raise PairError(
                f'encoder="target" is set, and states have the width {target.hidden_size} in the target and '
                f"{model.hidden_size} in the draft model",
                "leave it out, so that the draft model runs its own encoder.",
            )
        self.needs, self._runner.sources.reads_target = replace(self.needs, reads_encoder=True), True

    @override
    def begin(self, request: Request) -> None:
        self._runner.begin(request)

    @override
    def end(self, request: Request) -> None:
        self._runner.end(request)

    @override
    def observe_source(self, request: Request, source: Source) -> None:
        self._runner.sources.observe(request, source)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`; the runner compares the tokens in its cache with the request's anyway."""

    @override
    def catch_up(self, requests: Sequence[Request]) -> None:
        self._draw_chains([(request, 0) for request in requests])

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafting, searching = list[tuple[Request, int]](), list[tuple[Request, int]]()
        for request, limit in zip(requests, limits, strict=True):
            if limit > 0:
                (drafting if request.search is None else searching).append((request, limit))
        drafts = self._draft(drafting, self._topology)
        if searching:
            drafts |= self._draft_beams(searching)
        return [drafts.get(request.seq_id, DraftTree.empty()) for request in requests]

    def _draft(self, drafting: Drafting, topology: TreeTopology | DynamicTree | None) -> Proposals:
        if topology is None:
            return self._draw_chains(drafting)
        if not isinstance(topology, DynamicTree):
            return self._draw_trees(drafting, topology)
        ranked = [(request, limit) for request, limit in drafting if request.shared_noise]
        others = [(request, min(limit, topology.depth)) for request, limit in drafting if not request.shared_noise]
        drafts = self._draw_chains(others) if others else Proposals()
        return drafts | grow_dynamic(self._runner, ranked, topology, self._vocab_size, self._sampler)

    def _draw_chains(self, drafting: Drafting) -> Proposals:
        runner, drafts = self._runner, Proposals()
        chains = runner.plan(drafting)
        grow(runner.model, chains, runner.cache, self._vocab_size, self._sampler, self.guess)
        for chain in chains:
            runner.note(chain.request, [*chain.input_tokens, *chain.tokens[:-1]])
            if chain.tokens:
                drafts[chain.request.seq_id] = chain.draft()
        return drafts

    def _draw_trees(self, drafting: Drafting, topology: TreeTopology) -> Proposals:
        trees = plan_trees([self._runner], drafting)
        grow_trees([self._runner], trees, topology, self._vocab_size, self._sampler)
        return {tree.request.seq_id: draft for tree in trees if (draft := tree.draft()).size}

    def _draft_beams(self, drafting: Drafting) -> Proposals:
        """Draft for beam searches, at most as deep as the configured tree."""
        if self._topology is not None:
            level = NODES_PER_BEAM * self._topology.depth
            drafting = [
                (request, min(limit, level * request.search.beams.width))
                for request, limit in drafting
                if request.search is not None
            ]
        return draft_beams(self._runner, drafting, NODES_PER_BEAM, self._vocab_size, self._sampler)


def make_drafter(context: DrafterContext, model: CausalLM, topology: TreeTopology | DynamicTree | None) -> ModelDrafter:
    """Return the drafter of a model, with a cache of its own; topology None = chains."""
    return ModelDrafter(DraftModelRunner.of(context, model), context.vocab_size, context.sampler, topology)
