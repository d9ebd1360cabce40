"""Look-ahead rows in the target's pass have the states of a fresh pass, and change nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from speculant.cache import KVCache, paged_cache, slotted_cache
from speculant.config import Limits
from speculant.drafting import DrafterNeeds, Drafters, LookAheadTree, StatelessDrafter, TargetNeeds
from speculant.engine import Engine, EngineOptions
from speculant.lengths import Fixed
from speculant.params import SamplingParams
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, DraftTree, Request
from tests.contracts.test_observed_rows import BACKENDS, PROMPTS, REFERENCE, Reader
from tests.fakes import known_verifiers
from tests.heads import fresh_ahead
from tests.small_models import make_model

LIMITS = Limits(max_model_len=60, max_num_seqs=3, max_num_batched_tokens=40)


class LookingAhead(StatelessDrafter):
    """Drafts trees of right and wrong tokens with rows of its own, whose states it compares with a fresh pass."""

    def __init__(self, reader: Reader, exact: bool) -> None:
        self._reader, self._exact = reader, exact
        model = reader.model
        needs = TargetNeeds((model.num_layers + 1,), inputs=2)
        self.needs = DrafterNeeds(target=needs, emits_tree=True, max_nodes=4)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(2, model.hidden_size, generator=generator)
        self.inputs: Tensor = noise.to(model.cache_shape.dtype)
        self.num_compared = self.num_kept = 0

    def observe(self, request: Request, rows: CommittedRows) -> None:
        ahead = rows.hidden[0][len(rows.tokens) :]
        if not len(ahead):
            return
        end = rows.start + len(rows.tokens)
        fresh = fresh_ahead(self._reader.model, request.tokens[:end], self.inputs[: len(ahead)])
        same = torch.equal(ahead, fresh) if self._exact else torch.allclose(ahead, fresh, rtol=0, atol=1e-9)
        assert same, "the states are not those of a fresh pass"
        self.num_compared += 1
        self.num_kept += len(rows.tokens) - 1

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[DraftTree]:
        return [self._tree(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _tree(self, request: Request, limit: int) -> DraftTree:
        if not limit or len(request.tokens) % 5 == 0:
            return DraftTree.empty()
        ahead = self.inputs[: min(limit, 2)]
        if limit < 4 or len(request.tokens) % 5 == 1:
            return LookAheadTree.around(DraftTree.empty(), ahead)
        first = self._reader.next_token(request.tokens)
        second = self._reader.next_token([*request.tokens, first])
        wrong = (first + 1) % self._reader.model.vocab_size
        return LookAheadTree.around(DraftTree.of([wrong, first, wrong, second], [-1, -1, 0, 1]), ahead)


def run(
    name: str, cache: str, drafting: bool, num_blocks: int = 60, max_tokens: int = 20
) -> tuple[LookingAhead, Engine, list[Request]]:
    model = make_model(name)
    sizes = (model.cache_shape, num_blocks, 4)
    made: KVCache = paged_cache(*sizes) if cache == "paged" else slotted_cache(model.cache_shape, 3, 60)
    drafter = LookingAhead(Reader(model), exact=name != REFERENCE)
    drafters = Drafters.of(drafter if drafting else None)
    options = EngineOptions(LIMITS, 0, frozenset())
    engine = Engine(options, model, made, KeyedChances(), known_verifiers(), Fixed(4), drafters)
    requests: list[Request] = []
    for index, prompt in enumerate([*PROMPTS, PROMPTS[0]]):
        params = SamplingParams(temperature=index % 2, seed=index, n=1 + (index == 0), max_tokens=max_tokens)
        requests += engine.add_request(prompt, params, str(index))
    while engine.has_unfinished():
        engine.step()
        engine.check()
    assert {request.ending.error for request in requests} == {None}
    assert engine.metrics.drafter_errors == 0, "a state was not that of a fresh pass; see the log"
    return drafter, engine, requests


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", ["paged", "slotted"])
@pytest.mark.parametrize("name", BACKENDS)
def test_states_of_own_rows_are_those_of_a_fresh_pass(name: str, cache: str) -> None:
    """Trees with own rows below each node, several requests in different states, prompts in chunks, prefix hits."""
    drafter, _, requests = run(name, cache, drafting=True)
    _, _, plain = run(name, cache, drafting=False)
    assert [request.output for request in requests] == [request.output for request in plain]
    assert drafter.num_compared > 10
    assert drafter.num_kept > 5, "no state below an accepted node was compared"


@pytest.mark.parametrize("name", BACKENDS)
def test_look_ahead_rows_cause_no_preemption(name: str) -> None:
    """They use the rows that the step leaves; if memory is short, there are fewer or none."""
    drafter, engine, requests = run(name, "paged", drafting=True, num_blocks=24)
    _, tight, plain = run(name, "paged", drafting=False, num_blocks=24)
    assert [request.output for request in requests] == [request.output for request in plain]
    assert engine.metrics.preemptions <= tight.metrics.preemptions + 1
    assert drafter.num_compared > 0
