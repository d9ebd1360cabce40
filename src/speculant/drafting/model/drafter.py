"""A drafter around one model: chains, trees of a topology, and continuations of a beam search's hypotheses.

With a dynamic tree, requests that a ratio rule verifies get chains as long as the tree is deep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from speculant.cache import Source
from speculant.drafting.base import DrafterContext, DrafterNeeds, StatelessDrafter
from speculant.drafting.growth import Drafting, Guess, draft_beams, draft_shaped, grow_chains, grow_trees
from speculant.drafting.guard import Proposals
from speculant.drafting.model.runner import DraftModelRunner
from speculant.drafting.topology import USUAL_NODES, DynamicTree, StaticTree, TreeTopology
from speculant.errors import ConfigError, PairError
from speculant.kernels import REFERENCE, Sampler
from speculant.models import CausalLM, Chain
from speculant.types import DraftTree, Request

NODES_PER_BEAM = 2


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
        self._draw([(request, 0) for request in requests], None)

    @override
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        drafting, searching = list[tuple[Request, int]](), list[tuple[Request, int]]()
        for request, limit in zip(requests, limits, strict=True):
            if limit > 0:
                (drafting if request.search is None else searching).append((request, limit))
        topology = self._topology
        if isinstance(topology, DynamicTree):
            drafts = self._draft_dynamic(drafting, topology)
        else:
            drafts = self._draw(drafting, topology)
        if searching:
            drafts |= self._draft_beams(searching)
        empty = DraftTree.empty()
        return [drafts.get(request.seq_id, empty) for request in requests]

    def _draft_dynamic(self, drafting: Drafting, topology: DynamicTree) -> Proposals:
        """Draft dynamic trees, and chains as deep for requests with ratio rules, which such a shape would bias."""
        ranked = [(request, limit) for request, limit in drafting if request.shared_noise]
        others = [(request, min(limit, topology.depth)) for request, limit in drafting if not request.shared_noise]
        drafts = self._draw(others, None) if others else Proposals()
        return drafts | self._draw(ranked, topology)

    def _draw(self, drafting: Drafting, topology: TreeTopology | DynamicTree | None) -> Proposals:
        """Draft for pairs (request, limit); topology None = chains."""
        runner, drafts = self._runner, Proposals()
        if isinstance(topology, StaticTree | DynamicTree):
            return draft_shaped(runner, drafting, topology, self._vocab_size, self._sampler)
        if topology is not None:
            return grow_trees([runner], drafting, topology, self._vocab_size, self._sampler)
        chains = runner.plan(drafting)
        self._grow(chains)
        for chain in chains:
            runner.note(chain.request, [*chain.input_tokens, *chain.tokens[:-1]])
            if chain.tokens:
                drafts[chain.request.seq_id] = chain.draft()
        return drafts

    def _grow(self, chains: Sequence[Chain]) -> None:
        runner = self._runner
        grow_chains(runner.model, chains, runner.cache, self._vocab_size, self._sampler, self.guess)

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
