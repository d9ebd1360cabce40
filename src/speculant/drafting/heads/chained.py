"""Modules in a chain, each of which drafts one token (arXiv 2412.19437, section 2.2).

Row i of module k, counted from 1, reads the state that module k - 1 computes in its row i, and token i + k. Module 0 is
the target.

    tokens     t0 t1 t2 t3           t3 = the newest token             d1, d2 = the first two drafted tokens
    module 1   (h0, t1)  (h1, t2)  (h2, t3)      predicts d1           h = states of the target
    module 2   (g0, t2)  (g1, t3)  (g2, d1)      predicts d2           g = states of module 1

Each module has a KV cache. Rows of committed tokens stay in it. Rows of drafted tokens are dropped after each draft,
and so are the states computed from them. Each token is drawn from the distribution that its module computes after all
tokens before it. The verifier gets this distribution, so all verification rules are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from speculant.drafting.growth import Drafting, chain_input, draw_chains, fit_vocabulary
from speculant.drafting.guard import Proposals
from speculant.drafting.heads.hidden_drafter import HiddenDrafter
from speculant.drafting.heads.hidden_runner import HiddenStateRunner
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.models.base import Chain, build_batch
from speculant.sampling.distribution import Node, distribution
from speculant.types import CommittedRows, DraftTree, Request


class ModuleRunner(HiddenStateRunner):
    """Follows the states of the module before this one.

    texts: the tokens of sequences that have drafted ones in this round, these included.
    """

    takes_more = False  # the module after this one needs the states of the rows
    texts: Mapping[int, list[int]] = {}

    @override
    def text(self, request: Request) -> list[int]:
        return self.texts.get(request.seq_id, request.tokens)

    def start(self, request: Request) -> int:
        """Return the position of the next row."""
        followed = self._followed[request.seq_id]
        return followed.first + followed.length

    def note(self, request: Request, tokens: Sequence[int]) -> None:
        """See the base: rows of drafted tokens do not stay."""
        committed = len(request.tokens) - self._shift - self.start(request)
        super().note(request, tokens[: max(0, committed)])

    def settle(self, request: Request) -> None:
        """Drop the rows of drafted tokens, and the states that are made of any."""
        followed = self._followed[request.seq_id]
        if followed.pending is not None:
            followed.pending.keep(max(0, len(request.tokens) + 1 - self._shift - self.start(request)))
        if followed.length < self.cache.length(request.seq_id):
            self.finish(request)


class ChainedDrafter(HiddenDrafter):
    """Drafts a token with each of the modules; layers: those of the target whose states the first one reads."""

    def __init__(
        self, modules: Sequence[ModuleRunner], layers: Sequence[int], vocab_size: int, sampler: Sampler = REFERENCE
    ) -> None:
        super().__init__(modules[0], layers, vocab_size, sampler)
        self._modules, self.caches = tuple(modules), tuple(module.cache for module in modules)
        self.needs = replace(self.needs, max_nodes=len(modules), usual_nodes=len(modules))

    @override
    def begin(self, request: Request) -> None:
        for module in self._modules:
            module.begin(request)

    @override
    def end(self, request: Request) -> None:
        for module in self._modules:
            module.end(request)

    @override
    def match_prefix(self, request: Request) -> int:
        found = super().match_prefix(request)
        if request.search is not None:
            return found
        return min(found, *(module.known_prefix(request) for module in self._modules[1:]))

    @override
    def _draw(self, drafting: Drafting, topology: object) -> Proposals:
        most, requests = len(self._modules), [request for request, _ in drafting]
        chains = self._modules[0].plan([(request, min(limit, most)) for request, limit in drafting])
        levels = _Levels(self._modules, requests, chains, self._vocab_size, self._sampler)
        try:
            made = draw_chains(chains, levels)
            levels.end()
        finally:
            for module in self._modules:
                module.texts = {}
                for request in requests:
                    module.settle(request)
        return {chain.request.seq_id: draft for chain, draft in zip(chains, made, strict=True) if draft.size}


@dataclass
class _Levels:
    """The passes of a round, one of each module. chains: the input of the first; level: the next module's index."""

    modules: Sequence[ModuleRunner]
    requests: Sequence[Request]
    chains: Sequence[Chain]
    vocab_size: int
    sampler: Sampler
    level: int = 0

    def __call__(self, nodes: Sequence[Node]) -> Tensor:
        """Return the distribution [V] of the next token after each of the nodes: zeros if its module has a backlog."""
        logits = self._pass({node.request.seq_id: node.drafted for node in nodes})
        able = [place for place, node in enumerate(nodes) if node.request.seq_id in logits]
        device = self.modules[0].model.cache_shape.device
        probs = torch.zeros(len(nodes), self.vocab_size, dtype=torch.float64, device=device)
        if able:
            rows = torch.stack([logits[nodes[place].request.seq_id] for place in able])
            probs[able] = distribution(rows, [nodes[place] for place in able], self.sampler).to(probs)
        return probs

    def end(self) -> None:
        """Let the other modules process committed tokens."""
        while self.level < len(self.modules):
            self._pass({})

    def _pass(self, drafted: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Run the next module; return the logits [V] of the sequences that have these drafted tokens so far."""
        module, after = self.modules[self.level], self.modules[self.level + 1 : self.level + 2]
        chains = self.chains if not self.level else self._plan(module, drafted)
        self.level += 1
        if not chains:
            return {}
        model, states = module.model, dict[int, Tensor]()
        inputs = [
            chain_input(chain, chain.input_tokens, model.vocab_size, DraftTree.empty(), chain.hidden)
            for chain in chains
        ]
        hidden = model.forward(build_batch(inputs, module.cache, model.cache_shape.device), module.cache.storage)
        assert hidden.carried is not None, "the model hands nothing on"
        end = 0
        for chain in chains:
            request, first, end = chain.request, end, end + len(chain.input_tokens)
            if chain.limit and request.seq_id in drafted:
                states[request.seq_id] = hidden.last[end - 1]
            for following in after:
                rows = hidden.carried[first:end]
                following.observe(request, CommittedRows(module.start(request), chain.input_tokens, hidden=(rows,)))
            module.note(request, chain.input_tokens)
        if not states:
            return {}
        logits = fit_vocabulary(model.logits(torch.stack([*states.values()])), self.vocab_size)
        return dict(zip(states, logits, strict=True))

    def _plan(self, module: ModuleRunner, drafted: Mapping[int, Sequence[int]]) -> Sequence[Chain]:
        """Plan the input of a module after the first one."""
        drawing = [request for request in self.requests if request.seq_id in drafted]
        module.texts = {request.seq_id: [*request.tokens, *drafted[request.seq_id]] for request in drawing}
        return module.plan([(request, int(request.seq_id in drafted)) for request in self.requests])
