"""A drafter around one draft model: chains of tokens, and continuations of a beam search's hypotheses."""

from __future__ import annotations

from collections.abc import Sequence

from speculant.drafting.base import DrafterNeeds, StatelessDrafter
from speculant.drafting.model.beams import draft_beams
from speculant.drafting.model.chains import Guess, grow
from speculant.drafting.model.runner import DraftModelRunner
from speculant.kernels.base import Sampler
from speculant.kernels.reference_sampler import REFERENCE
from speculant.types import DraftTree, Request

NODES_PER_BEAM = 2

Drafting = Sequence[tuple[Request, int]]  # requests with their limits


class ChainDrafter(StatelessDrafter):
    """Drafts with the model of `runner`, all sequences of a round in one flat batch.

    vocab_size is the target's: the draft's distributions are cut or padded with zeros to it.
    """

    guess: Guess | None = None  # what the model may draw next

    def __init__(self, runner: DraftModelRunner, vocab_size: int, sampler: Sampler = REFERENCE) -> None:
        self.needs = DrafterNeeds(
            emits_probs=True, own_cache=True, max_positions=runner.model.max_positions, nodes_per_beam=NODES_PER_BEAM
        )
        self._runner, self.caches = runner, (runner.cache,)
        self._vocab_size, self._sampler = vocab_size, sampler

    def begin(self, request: Request) -> None:
        """See `Drafter.begin`."""
        self._runner.begin(request)

    def end(self, request: Request) -> None:
        """See `Drafter.end`."""
        self._runner.end(request)

    def roll_back(self, request: Request, dropped: Sequence[int]) -> None:
        """See `Drafter.roll_back`; the runner compares the tokens in its cache with the request's anyway."""

    def catch_up(self, requests: Sequence[Request]) -> None:
        """See `Drafter.catch_up`."""
        self._grow_chains([(request, 0) for request in requests])

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        """See `Drafter.propose`."""
        others, searching = list[tuple[Request, int]](), list[tuple[Request, int]]()
        for request, limit in zip(requests, limits, strict=True):
            if limit > 0:
                (others if request.search is None else searching).append((request, limit))
        made = self._draft(others)
        if searching:
            made |= self._search(searching)
        return [made.get(request.seq_id, DraftTree.empty()) for request in requests]

    def _draft(self, drafting: Drafting) -> dict[int, DraftTree]:
        """Return drafts by sequence."""
        return self._grow_chains(drafting)

    def _grow_chains(self, drafting: Drafting) -> dict[int, DraftTree]:
        runner = self._runner
        chains = runner.plan(drafting)
        grow(runner.model, chains, runner.cache, self._vocab_size, self._sampler, self.guess)
        drafts = dict[int, DraftTree]()
        for chain in chains:
            runner.note(chain.request, [*chain.input_tokens, *chain.tokens[:-1]])
            if chain.tokens:
                drafts[chain.request.seq_id] = DraftTree.chain(chain.tokens, chain.probs)
        return drafts

    def _search(self, drafting: Drafting) -> dict[int, DraftTree]:
        """Return drafts of beam searches by sequence."""
        return draft_beams(self._runner, drafting, NODES_PER_BEAM, self._vocab_size, self._sampler)
