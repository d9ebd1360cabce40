"""Every drafter within a cascade: only committed text stays in its caches, whatever the outer model draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from speculant import SamplingParams, plugins
from speculant.cache import KVCache, paged_cache
from speculant.drafting import Drafter, DraftModelRunner, InnerDrafter, SubDrafter
from speculant.lab.exactness import FULL_SUPPORT, Pair
from speculant.models import Chain
from speculant.sampling import KeyedChances
from speculant.types import CommittedRows, Request
from tests.mapped import WORDS, mapped_drafter, table_of
from tests.models import VOCAB_SIZE, Checkpoints, make_request
from tests.workshops import CONTINUATION, KIND, Workshop

PROBE = -999  # a sequence for queries of the prefix index
LIMIT = 6
DRAWN = [41, 3, 42, 43, 44]  # what the outer model draws, which is hardly ever committed
PARAMS = {"greedy": SamplingParams(temperature=0), "sampled": SamplingParams(temperature=0.7)}
ROUNDS = [[50], [3, 51], [CONTINUATION[0], 52, 53], [41, 3, 54]]  # what is committed; the last begins as drawn


def chain_of(request: Request, tokens: Sequence[int]) -> Chain:
    return Chain(request, request.tokens[-1:], LIMIT, KeyedChances().draft(request), list(tokens))


def begun(drafter: Drafter, request: Request, vocab_size: int = VOCAB_SIZE) -> InnerDrafter:
    inner = InnerDrafter(SubDrafter("inner", drafter, LIMIT), vocab_size)
    inner.begin(request)
    return inner


def guess(inner: InnerDrafter, request: Request, drawn: Sequence[int] = ()) -> list[int]:
    (tree,) = inner.guess([chain_of(request, drawn)])
    return tree.token_list


def commit(inner: InnerDrafter, request: Request, tokens: Sequence[int]) -> None:
    start = len(request.tokens) - 1
    request.extend(tokens)
    request.rounds += 1
    inner.observe(request, CommittedRows(start, request.tokens[start:-1], list(tokens)))


def indexed(cache: KVCache, request: Request, drawn: Sequence[int]) -> int:
    """Return how many positions of a text with drawn tokens are in the prefix index."""
    held = cache.match_prefix(PROBE, [*request.tokens, *drawn, *[0] * cache.block_size], request.full_salt)
    cache.release(PROBE)
    return held


def stored(cache: KVCache, seq_id: int) -> list[torch.Tensor]:
    """Return the keys and values of a sequence, layer by layer."""
    places = torch.arange(cache.length(seq_id))
    table = torch.tensor(cache.table(seq_id).tolist(), dtype=torch.int64)
    slots = table[places // cache.block_size] * cache.block_size + places % cache.block_size
    layers = range(cache.storage._shape.num_layers)  # type: ignore[attr-defined]
    return [each for layer in layers for each in cache.storage.read(layer, slots)]


class Nested(Workshop):
    """A cascade whose inner drafter is a draft model."""

    @property
    def options(self) -> dict[str, Any]:
        return {"inner": {"method": "draft_model", "model": self.checkpoints.far}}


@torch.inference_mode()
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", [*sorted(plugins.names(KIND)), "nested"])
def test_an_inner_drafter_keeps_the_committed_text_alone(checkpoints: Checkpoints, name: str, params: str) -> None:
    workshop = Nested("cascade", checkpoints) if name == "nested" else Workshop(name, checkpoints)
    request = workshop.request(params=PARAMS[params])
    inner = begun(workshop.build(), request)
    if inner.needs.target_inputs:
        pytest.skip("it drafts in the target's pass, and can't be within another one")
    for tokens in ROUNDS:
        for length in range(len(DRAWN)):
            guess(inner, request, DRAWN[:length])
            for cache in inner.caches:
                assert indexed(cache, request, DRAWN[:length]) <= len(request.tokens), "a drawn token is indexed"
                cache.check()
        commit(inner, request, tokens)
    fresh = begun(workshop.build(), request)
    assert guess(inner, request) == guess(fresh, request)
    for cache, other in zip(inner.caches, fresh.caches, strict=True):
        assert cache.length(request.seq_id) == other.length(request.seq_id)
        for mine, expected in zip(stored(cache, request.seq_id), stored(other, request.seq_id), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)
    assert inner.errors == fresh.errors == 0
    for each in (inner, fresh):
        each.end(request)
    workshop.check()


@pytest.mark.parametrize("name", WORDS)
def test_a_text_of_other_tokens_is_read_as_it_is_committed(name: str) -> None:
    """The table model asserts that each row follows the tokens of one text, and its next tokens are those of it."""
    words = WORDS[name]
    model = table_of(words, Pair(3, words.rows, FULL_SUPPORT).draft)

    def drafter() -> Drafter:
        runner = DraftModelRunner(model, paged_cache(model.cache_shape, 64, 2), KeyedChances(), 256)
        return mapped_drafter(runner, words.vocabulary)

    request = make_request([0, 2, 1], params=SamplingParams(temperature=0))
    inner, drawn = begun(drafter(), request, words.size), [1, 2, 0, 0]
    for tokens in ([2], [0, 1, 1], [1, 2, 1]):
        for length in range(len(drawn)):
            fresh = begun(drafter(), request, words.size)
            assert guess(inner, request, drawn[:length]) == guess(fresh, request, drawn[:length])
        commit(inner, request, tokens)
    assert inner.errors == 0
